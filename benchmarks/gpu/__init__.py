"""Measurements on one GPU: the ceiling of matrix products, a training step, the schemes'
numerics."""
