"""Training: one optimizer step, the loop around it, the optimizer, metrics and console output."""
