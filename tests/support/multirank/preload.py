"""Imported by the server from which workers are forked: what each of them would import by itself.

A mistake in the package must fail the tests that meet it, not the server.
"""

import contextlib
import importlib

for name in (
    "pytest",
    "hypothesis",
    "torch.distributed.checkpoint",
    "gridformer.launch.run",
    "gridformer.memory.measure",
    "tests.support.multirank.exactness",
):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
