"""Runs what `gridformer.comm` does over NCCL on gloo: pass a test's function to `on_nccl`.

    pool.run(4, on_nccl, what_one_rank_does, "an argument")

gloo serves the same calls, on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from unittest.mock import patch

from gridformer.mesh import groups

Result = TypeVar("Result")


def on_nccl(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Return the function's result, computed while every group is taken for an NCCL group."""
    with patch.object(groups, "over_nccl", return_value=True):
        return function(*args, **kwargs)
