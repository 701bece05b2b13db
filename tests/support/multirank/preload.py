"""Imported by the server that workers are forked from, so that workers need not import it again.

A mistake in the package must fail the tests that use it, not the server.
"""

import contextlib
import importlib

for name in (
    "pytest",
    "hypothesis",
    "safetensors",
    "gridformer.launch.run",
    "gridformer.memory.measure",
    "tests.support.multirank.exactness",
):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
