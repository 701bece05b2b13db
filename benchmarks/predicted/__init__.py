"""What `gridformer predict` says, against what is measured on the same machine."""
