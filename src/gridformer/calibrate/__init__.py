"""Measures this machine and writes a cluster file: `gridformer calibrate`."""
