"""Tensor-parallel forms of a model's modules."""
