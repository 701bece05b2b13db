"""Measurements behind the claims of the documentation: a package a claim, run with `python -m`."""
