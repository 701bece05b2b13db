"""Measures this machine and writes a cluster file; see `gridformer calibrate`.

Only the modules that measure import torch.
"""
