"""Products over chunks or panels run once for each shape, and what they do is repeated exactly."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import decide_run
from gridformer.trace import Place, Wait, products_once, repeated_products, trace_rank
from tests.support.chunks import in_three
from tests.support.fake_gpu import InProcess
from tests.support.marks import full_unless
from tests.support.traces import Single, numbered, run_of

BRANCHES = {"scheme": "subgraph", "branches": 2}
SEQUENCE = {"scheme": "megatron", "cols": 2, "sequence_parallel": True}
GRID = {"scheme": "optimus", "rows": 2, "cols": 2}
MIXED = {"dtype": "bfloat16", "recompute": "full"}
# A layout, training settings and the model. With one micro-batch no passes follow from others.
CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (BRANCHES, MIXED, {"family": "llama"}),
    ({**BRANCHES, "common": "first"}, {}, {}),
    (SEQUENCE, MIXED, {}),
    (SEQUENCE, {"recompute": "selective"}, {"family": "t5", "n_decoder_layers": 2}),
    (GRID, MIXED, {}),
    ({**GRID, "keep_gathered": "weights"}, {}, {"family": "llama"}),
    ({**GRID, "rows": 1, "cols": 3}, MIXED, {}),
    ({**GRID, "schedule": "broadcast"}, MIXED, {}),
    ({**GRID, "schedule": "pipelined", "stationary": "input"}, {}, {"family": "bert"}),
    ({**SEQUENCE, "dp": 2, "dp_mode": "fsdp"}, MIXED, {}),
]
IN_MAKE_TEST = (CASES[0], CASES[2], CASES[7])


def compared(run: RunConfig, kernels: bool) -> tuple[list[Single], list[Single], dict[str, int]]:
    """Return the events of a complete trace, of one with repeated products, and what was run."""
    torch.set_num_threads(1)
    counts = Counter[str]()

    def counted(name: str, real: Any) -> Any:
        def product(*args: Any) -> Any:
            counts[name] += 1
            return real(*args)

        return product

    with in_three(), ExitStack() as stack:
        decisions = decide_run(run)
        for kind, names in repeated_products._PRODUCTS.items():
            for name in names:
                once = counted("run", getattr(kind, name))
                stack.enter_context(patch.object(kind, name, once))
        whole = numbered(trace_rank(run, 0, decisions, kernels=kernels))
        n_whole = counts.pop("run")
        again = counted("again", repeated_products.RepeatedProducts._repeat)
        stack.enter_context(patch.object(repeated_products.RepeatedProducts, "_repeat", again))
        repeated = numbered(trace_rank(run, 0, decisions, True, kernels=kernels))
    return whole, repeated, {"whole": n_whole, **counts}


@pytest.mark.parametrize("kernels", [False, pytest.param(True, id="with kernels")])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("case", full_unless(IN_MAKE_TEST.__contains__, CASES), ids=str)
def test_repeated_products_are_those_that_are_run(
    gpu: InProcess, case: Any, micro_batches: int, kernels: bool
) -> None:
    layout, train, model = case
    run = run_of({"pp": 1, **layout, "micro_batches": micro_batches}, train, n_layers=4, **model)
    whole, repeated, counts = gpu(compared, run, kernels)
    assert whole == repeated
    assert counts["again"] >= counts["run"] / 2, counts
    if not kernels:  # with them, equal micro-batches of the second trace are traced once
        assert counts["run"] + counts["again"] == counts["whole"]


def test_a_wait_in_the_line_of_the_caller_moves_with_the_caller() -> None:
    """A forward and a backward pass wait for the same product in different lines."""
    here, inside = Place("a.py", 1, "f", "layers.0"), Place("b.py", 2, "g", "layers.0")
    there = Place("c.py", 3, "h", "layers.1", backward=True)
    part = products_once._Part([Wait(1, here), Wait(2, inside)], 0, here)
    moved = Place("b.py", 2, "g", "layers.1", backward=True)
    assert part.at(there, there) == [Wait(1, there), Wait(2, moved)]
