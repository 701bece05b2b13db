"""Measurements on one GPU: matrix products, a training step, and the schemes' numerics."""
