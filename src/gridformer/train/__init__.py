"""Training: one step, the loop around it, and what survives of it on disk."""
