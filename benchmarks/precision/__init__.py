"""Loss curves: half precision beside float32, and layouts beside one process."""
