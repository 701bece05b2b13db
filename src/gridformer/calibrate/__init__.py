"""Measures the machine at hand and writes a cluster file; see `gridformer calibrate`.

Only the modules that measure import torch.
"""
