"""Measurements behind the claims of the documentation, one package for each claim.

Run a package with `python -m`, for instance `python -m benchmarks.schemes`.
"""
