"""Loss curves: half precision compared with float32, and layouts compared with one process."""
