"""Measurements behind the claims of the documentation: one module a claim, run with `python -m`."""
