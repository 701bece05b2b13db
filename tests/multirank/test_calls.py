"""How many Python calls of the project one MLP takes, and which files a step with each scheme runs.

`python -m tests.multirank.test_calls` prints each call.
"""

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
from gridformer.config import LayoutConfig, TrainConfig
from gridformer.parallel import build_parallel
from gridformer.train.step import Stepper
from gridformer.utils.batch import next_words
from tests.support.multirank.exactness import CPU, axes_of, batch_of, built, tiny
from tests.support.multirank.layouts import Layout
from tests.support.multirank.pool import WorkerPool
from tests.support.reading_order import reading_order

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
    config = tiny(max_seq_len=12)
    model, _, plan = built(layout, config)
    layer: Any = model.get_submodule("layers.0")
    x = torch.randn(4 // plan.rows, 12, 48 // (plan.cols if plan.scheme == "optimus" else 1))
    for _ in range(2):
        x = x.detach().requires_grad_()
        with counted() as forward:
            y = layer.mlp(layer.norm2(x))
        with counted() as backward:
            y.sum().backward()
    return forward, backward


MLPS: dict[str, Layout] = {
    "optimus 2x2": {"scheme": "optimus", "rows": 2, "cols": 2},
    "megatron 1x4": {"scheme": "megatron", "cols": 4},
}
# The most calls, and the most files, forward and backward.
MOST = {"optimus 2x2": ((60, 8), (80, 8)), "megatron 1x4": ((40, 6), (80, 8))}


@pytest.mark.parametrize("name", MLPS)
def test_an_mlp_takes_few_calls_in_few_files(pool: WorkerPool, name: str) -> None:
    for passes in pool.run(4, calls_of, MLPS[name]):
        for calls, (most, files) in zip(passes, MOST[name], strict=True):
            assert calls.total() <= most, calls
            assert len({file for file, _ in calls}) <= files, calls


ROWS = 4
# Of a layout's list, the numbers that it does not run: one device has no scheme and no grid.
ON_ONE_DEVICE = {6, 7, 8}
LAYOUTS: dict[str, Layout] = {
    "single": {},
    "megatron": {"scheme": "megatron", "cols": 4},
    "megatron, sequence parallel": {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
    "megatron_2d": {"scheme": "megatron_2d", "rows": 2, "cols": 2},
    "optimus": {"scheme": "optimus", "rows": 2, "cols": 2},
    "optimus, broadcast": {"scheme": "optimus", "rows": 2, "cols": 2, "schedule": "broadcast"},
    "subgraph": {"scheme": "subgraph", "branches": 4},
}


def files_of(layout: Layout) -> tuple[set[str], set[str]]:
    """Return the files that run when a rank builds its model, and in one of its steps."""
    torch.set_num_threads(1)
    plan, config = LayoutConfig(**layout), tiny(max_seq_len=12)
    axes = axes_of(plan)
    with counted() as built:
        model = build_parallel(config, plan, axes, 1, CPU)
    stepper = Stepper(model, TrainConfig(global_batch=ROWS), axes, plan)

    def step(number: int) -> None:
        stepper(number, lambda rows: next_words(batch_of(number, config, ROWS)[rows]))

    step(0)  # creates the optimizer's state
    with counted() as in_step:
        step(1)
    return {file for file, _ in built}, {file for file, _ in in_step}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_reading_order_names_every_file_of_a_step(pool: WorkerPool, name: str) -> None:
    layout = LAYOUTS[name]
    n = LayoutConfig(**layout).n_processes
    found = pool.run(n, files_of, layout)
    built = set().union(*(of_rank for of_rank, _ in found))
    in_step = set().union(*(of_rank for _, of_rank in found))
    order = reading_order()
    listed = {file for files in order.numbered.values() for file in files}
    assert in_step - listed - order.helpers == set(), "they run, and the page does not name them"
    assert len(order.numbered) <= 10
    for number, files in order.numbered.items():
        expected = number not in ON_ONE_DEVICE or n > 1
        assert any(file in in_step for file in files) == expected, (number, files)
    scheme = LayoutConfig(**layout).scheme
    assert f"parallel/{'scheme' if scheme == 'single' else scheme}.py" in built


def test_the_page_lists_no_helper_that_never_runs(pool: WorkerPool) -> None:
    order = reading_order()
    found = []
    for layout in LAYOUTS.values():
        found.append(pool.run(LayoutConfig(**layout).n_processes, files_of, layout))
    in_step = set().union(*(files for ranks in found for _, files in ranks))
    assert order.helpers - in_step == set()


if __name__ == "__main__":
    workers = WorkerPool()
    for name, layout in MLPS.items():
        for which, calls in zip(("forward", "backward"), workers.run(4, calls_of, layout)[0]):
            files = {file for file, _ in calls}
            print(f"{name}, {which}: {calls.total()} calls in {len(files)} files")
            for (file, function), n in sorted(calls.items()):
                print(f"{n:5} {file:42} {function}")
    workers.close()
