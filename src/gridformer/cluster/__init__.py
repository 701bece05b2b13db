"""Describes a machine, and predicts the time of a kernel or a message on it."""
