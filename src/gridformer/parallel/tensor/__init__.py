"""Parallel forms of a model's modules."""
