"""Tensor-parallel schemes side by side on this machine: time, messages and memory of a layer."""
