"""How many Python calls of the project one MLP takes, forward and backward, and in how many files.

`python -m tests.multirank.test_calls` prints each call.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import gridformer
from gridformer.config import LayoutConfig
from gridformer.parallel import build_parallel
from tests.support.multirank.exactness import CPU, axes_of, tiny
from tests.support.multirank.layouts import Layout
from tests.support.multirank.pool import WorkerPool

Calls = Counter[tuple[str, str]]  # by file and function
SRC = f"{Path(gridformer.__file__).parent}/"


@contextmanager
def counted() -> Iterator[Calls]:
    """Count the calls of functions of gridformer by this thread."""
    calls: Calls = Counter()

    def called(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SRC):
            calls[code.co_filename.removeprefix(SRC), code.co_qualname] += 1

    before: Callable[..., Any] | None = sys.getprofile()
    sys.setprofile(called)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def calls_of(layout: Layout) -> tuple[Calls, Calls]:
    """Return the calls of norm and MLP of a GPT-2 layer, forward and backward, on the second x."""
    torch.set_num_threads(1)
    plan, config = LayoutConfig(**layout), tiny(max_seq_len=12)
    axes = axes_of(plan)
    model = build_parallel(config, plan, axes, 1, CPU)
    layer: Any = model.get_submodule("layers.0")
    x = torch.randn(4 // plan.rows, 12, 48 // (plan.cols if plan.scheme == "optimus" else 1))
    for _ in range(2):
        x = x.detach().requires_grad_()
        with counted() as forward:
            y = layer.mlp(layer.norm2(x))
        with counted() as backward:
            y.sum().backward()
    return forward, backward


LAYOUTS: dict[str, Layout] = {
    "optimus 2x2": {"scheme": "optimus", "rows": 2, "cols": 2},
    "megatron 1x4": {"scheme": "megatron", "cols": 4},
}
# The most calls, and the most files, forward and backward.
MOST = {"optimus 2x2": ((60, 8), (80, 8)), "megatron 1x4": ((40, 6), (80, 8))}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_mlp_takes_few_calls_in_few_files(pool: WorkerPool, name: str) -> None:
    for passes in pool.run(4, calls_of, LAYOUTS[name]):
        for calls, (most, files) in zip(passes, MOST[name], strict=True):
            assert calls.total() <= most, calls
            assert len({file for file, _ in calls}) <= files, calls


if __name__ == "__main__":
    workers = WorkerPool()
    for name, layout in LAYOUTS.items():
        for which, calls in zip(("forward", "backward"), workers.run(4, calls_of, layout)[0]):
            files = {file for file, _ in calls}
            print(f"{name}, {which}: {calls.total()} calls in {len(files)} files")
            for (file, function), n in sorted(calls.items()):
                print(f"{n:5} {file:42} {function}")
    workers.close()
