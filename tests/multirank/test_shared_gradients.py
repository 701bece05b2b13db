"""Parameters that pipeline stages share stay equal to the bit, whatever the order of sums in rings.

Where an NCCL ring begins depends on the machine's links, so sums of the same terms differ by bits
between groups. gloo always adds in the same order, so here each group gets its own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Pending
from gridformer.config import LayoutConfig, TrainConfig
from gridformer.mesh import Axis
from gridformer.parallel import build_parallel
from gridformer.parallel.data.copies import assert_copies_equal
from gridformer.train.step import Stepper
from tests.support.marks import full_unless
from tests.support.multirank.exactness import CPU, axes_of, batches_of, tiny
from tests.support.multirank.matrix import MODELS
from tests.support.multirank.pool import WorkerPool

Layout = dict[str, Any]

# Two stages share GPT-2's table, and three share T5's. Order matters only from three terms on.
CASES: dict[str, tuple[str, Layout]] = {
    "three replicas": ("GPT-2", {"pp": 2, "dp": 3}),
    "three replicas, zero1": ("GPT-2", {"pp": 2, "dp": 3, "dp_mode": "zero1"}),
    "three replicas, fsdp": ("GPT-2", {"pp": 2, "dp": 3, "dp_mode": "fsdp"}),
    "three stages": ("T5", {"pp": 3, "dp": 2}),
    "three stages, fsdp": ("T5", {"pp": 3, "dp": 2, "dp_mode": "fsdp"}),
}
QUICK = ("three replicas", "three stages")


def step_over_rings(layout: Layout, family: str) -> bool:
    """Run a step in which every group adds in its own order, and compare all copies.

    Returns whether the order made a difference to any sum on this rank.
    """
    torch.set_num_threads(1)
    config, plan = tiny(max_seq_len=8, n_layers=3, **MODELS[family]), LayoutConfig(**layout)
    axes, made_a_difference = axes_of(plan), False
    all_reduce = comm.all_reduce

    def ring(x: Tensor, axis: Axis) -> Tensor:
        nonlocal made_a_difference
        terms = [*comm.all_gather(x.unsqueeze(0), axis, 0)]
        first = axes.pp.index if axis.name == "dp" else axes.dp.index
        mine = in_order(terms, first)
        made_a_difference |= not torch.equal(mine, in_order(terms, first + 1))
        return mine

    def reduce(x: Tensor, axis: Axis, op: str = "sum", label: str = "") -> Tensor:
        if axis.name not in ("dp", "pp") or op != "sum":
            return all_reduce(x, axis, op, label)
        return x.copy_(ring(x, axis))

    def start_reduce(x: Tensor, axis: Axis, op: str = "sum", label: str = "") -> Pending:
        return Pending(reduce(x, axis, op, label))

    def start_scatter(x: Tensor, axis: Axis, dim: int, label: str = "") -> Pending:
        assert axis.name == "dp"
        return Pending(ring(x, axis).chunk(axis.size, dim)[axis.index].clone())

    model = build_parallel(config, plan, axes, 1, CPU)
    stepper = Stepper(model, TrainConfig(global_batch=6), axes, plan)
    batch = batches_of(0, config, 6)
    with (
        patch.object(comm, "all_reduce", reduce),
        patch.object(comm, "start_all_reduce", start_reduce),
        patch.object(comm, "start_reduce_scatter", start_scatter),
    ):
        stepper(0, lambda rows: {key: value[rows] for key, value in batch.items()})
    assert_copies_equal(model, axes)
    return made_a_difference


def in_order(terms: Sequence[Tensor], first: int) -> Tensor:
    """Return the terms' sum as a ring that begins at the given place adds them."""
    total = terms[first % len(terms)].clone()
    for turn in range(1, len(terms)):
        total += terms[(first + turn) % len(terms)]
    return total


@pytest.mark.parametrize("name", full_unless(QUICK.__contains__, CASES))
def test_copies_on_several_stages_stay_equal(pool: WorkerPool, name: str) -> None:
    family, layout = CASES[name]
    left_to_rings = any(pool.run(6, step_over_rings, layout, family))
    assert left_to_rings == (layout["dp"] > 2), "terms of stages are added up by each stage itself"
