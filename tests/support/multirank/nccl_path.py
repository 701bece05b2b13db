"""What `gridformer.comm` does over NCCL, done over gloo: run a test's function through `on_nccl`.

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
    """The function's result, while every group is taken for one of NCCL's."""
    with patch.object(groups, "over_nccl", return_value=True):
        return function(*args, **kwargs)
