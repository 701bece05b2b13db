"""Runs what `gridformer.comm` does over NCCL on gloo: pass a test's function to `on_nccl`.

    pool.run(4, on_nccl, what_one_rank_does, "an argument")

gloo serves the same calls, on CPU tensors. Unless a test asks for it, no run of a pipeline loads
kernels, so that all messages between stages take NCCL's path.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from unittest.mock import patch

import pytest

from gridformer.comm import P2PChannel
from gridformer.mesh import Axis, groups
from gridformer.parallel.pipeline import executor

Result = TypeVar("Result")


def on_nccl(
    function: Callable[..., Result], *args: Any, loading_runs: int = 0, **kwargs: Any
) -> Result:
    """Return the function's result, computed while every group is taken for an NCCL group.

    Args:
        function: The function, with its arguments.
        loading_runs: See `Executor.loads`.
    """
    with (
        patch.object(groups, "over_nccl", return_value=True),
        patch.object(Axis, "over_nccl", property(lambda _: True)),  # whatever an axis remembers
        patch.object(executor, "LOADING_RUNS", loading_runs),
    ):
        return function(*args, **kwargs)


Over = tuple[Callable[..., Any], ...]  # before a function that a pool runs
on_both_paths = pytest.mark.parametrize("over", [(), (on_nccl,)], ids=["gloo", "nccl"])


def one_group_for_all_messages() -> AbstractContextManager[object]:
    """A pipeline's messages are those of one group, in which a receive blocks a send."""
    return patch.object(P2PChannel, "_group", lambda self, *_: self.axis.group)
