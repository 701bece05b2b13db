"""Train transformers on a grid of devices, with the same loss as on one."""

__version__ = "0.1.0"
