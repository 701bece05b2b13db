"""Gradients are summed over replicas bucket by bucket while the backward pass runs."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gridformer import comm
from gridformer.comm import Pending
from gridformer.config import LayoutConfig, TrainConfig
from gridformer.mesh import Axes, Axis
from gridformer.models.blocks.cast import copy_of
from gridformer.parallel import build_parallel
from gridformer.parallel.data import buckets as bucketing
from gridformer.parallel.data import gradients as reductions
from gridformer.parallel.data.copies import assert_copies_equal
from gridformer.parallel.data.gradients import GradientSums, reduce_gradients
from gridformer.train.step import Stepper
from tests.support.marks import full_unless
from tests.support.multirank import exactness
from tests.support.multirank.layouts import Layout
from tests.support.multirank.matrix import MODELS
from tests.support.multirank.nccl_path import on_nccl
from tests.support.multirank.pool import WorkerPool

B = 12
CONFIG = exactness.tiny(max_seq_len=8)
DATA: Layout = {"scheme": "single", "dp": 2}
SUPER: Layout = {"scheme": "subgraph", "branches": 2, "dp": 2}
FIRST: Layout = {**SUPER, "common": "first"}
OPTIMUS: Layout = {"scheme": "optimus", "rows": 2, "cols": 1, "dp": 2}  # its copies are partial


def short(layout: Layout) -> str:
    return "-".join(map(str, layout.values()))


def sample_part(axes: Axes, micro: int = 0) -> Tensor:
    """Return this rank's samples of a micro-batch."""
    batch = exactness.batch_of(micro, CONFIG, B).chunk(axes.dp.size)[axes.dp.index]
    return batch.chunk(axes.batch.size)[axes.batch.index]


def waits_in(layout: Layout, micro_batches: int) -> tuple[int, int, list[float]]:
    """Return how often the last backward pass waits for a sum, and how many sums there are.

    The list says for each sum that starts how much of a layer's gradients those in flight then
    hold, but for the earliest one.
    """
    model, axes, _ = exactness.built(layout, CONFIG, "float64")
    layer = sum(p.numel() * p.element_size() for p in model.get_submodule("layers.0").parameters())
    with patch.object(bucketing, "BUCKET_BYTES", 4000):
        sums = GradientSums.of(model, axes)
        inside: list[bool] = []
        held: list[float] = []
        flying: list[Any] = []
        begin, scattered = reductions._Bucket.start, reductions._Bucket.scattered

        def begun(bucket: Any, final: bool) -> None:
            begin(bucket, final)
            held.append(sum(map(size_of, flying[1:])) / layer)
            flying.append(bucket)

        def size_of(bucket: Any) -> int:
            return sum(p.numel() * p.element_size() for p in bucket.parameters)

        def counted(bucket: Any) -> None:
            inside.append(bucket.in_flight)
            flying[:] = [other for other in flying if other is not bucket]
            scattered(bucket)

        counting = patch.multiple(reductions._Bucket, start=begun, scattered=counted)
        with counting:
            for micro in range(micro_batches):
                part = sample_part(axes, micro)
                loss = model.loss_sum(part[:, :-1], part[:, 1:])
                with sums.backward(last=micro == micro_batches - 1):
                    loss.backward()
            waited = sum(inside)
            reduce_gradients(model.parameters(), axes, sums)
    return waited, sum(inside), held


def test_a_pass_waits_for_sums_only_if_it_makes_the_first_gradients(pool: WorkerPool) -> None:
    """In a pipeline, the stage before would get its gradient later, and so would all others."""
    layout = {**DATA, "dp_mode": "zero1"}
    for waited, total, held in pool.run(2, on_nccl, waits_in, layout, 1):
        assert 0 < waited < total - 2
        assert 0.5 < max(held) <= 1.0
    for waited, total, _ in pool.run(2, on_nccl, waits_in, layout, 2):
        assert waited == 0
        assert total > 2
    # Over gloo messages take more memory.
    for micro_batches in (1, 2):
        for waited, total, _ in pool.run(2, waits_in, layout, micro_batches):
            assert waited == total - 2 > 0


# --------------------------------------------------- equality


def both_ways(layout: Layout, bucket_bytes: int) -> dict[str, float]:
    """Return the largest differences from gradients that are summed after the backward pass."""
    model, axes, _ = exactness.built(layout, CONFIG, "float64")
    with patch.object(bucketing, "BUCKET_BYTES", bucket_bytes):
        sums = GradientSums.of(model, axes)
        found = []
        for begun in (None, sums, sums):  # twice: nothing may be left over from the first time
            model.train()
            model.zero_grad()
            for micro in range(2):
                part = sample_part(axes, micro)
                loss = model.loss_sum(part[:, :-1], part[:, 1:])
                with begun.backward(last=micro == 1) if begun else nullcontext():
                    loss.backward()
            reduce_gradients(model.parameters(), axes, begun)
            found.append({name: grad.clone() for name, grad in exactness.gradients(model).items()})
    want, *others = found
    return {
        name: max(float((got[name] - grad).abs().max()) for got in others) / float(grad.abs().max())
        for name, grad in want.items()
        if not name.endswith("qkv.bias")  # the keys' part of it is rounding noise
    }


@pytest.mark.parametrize("bucket_bytes", [4000, 25 << 20])
@pytest.mark.parametrize("layout", [DATA, SUPER, FIRST, OPTIMUS], ids=short)
def test_overlapped_sums_equal_sums_after_the_backward_pass(
    pool: WorkerPool, layout: Layout, bucket_bytes: int
) -> None:
    """Sum over two micro-batches, the first of which sends nothing."""
    n = LayoutConfig(**layout).n_processes
    for differences in pool.run(n, both_ways, layout, bucket_bytes):
        assert differences
        assert max(differences.values()) < 1e-12, differences


# --------------------------------------------------- missing gradients


def with_gaps(n_rounds: int) -> list[list[float]]:
    """Parameter i of rank r gets the gradient 10 r + i, but some parameters get none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    axis = Axis("dp", size, rank)
    parameters = [nn.Parameter(torch.zeros(5, dtype=torch.float64)) for _ in range(7)]
    found = []
    with patch.object(bucketing, "BUCKET_BYTES", 80):  # two parameters
        sums = GradientSums([(axis, parameters)], parameters)
        assert sums.parameters == set(parameters)
        for round in range(n_rounds):
            for parameter in parameters:
                parameter.grad = None
            used = [i for i in range(7) if gets(i, rank, round)]
            with sums.backward():
                total = torch.stack([(10 * rank + i) * parameters[i].sum() for i in used]).sum()
                total.backward()
            sums.finish()
            found.append([float(p.grad.mean()) for p in parameters if p.grad is not None])
    return found


def gets(i: int, rank: int, round: int) -> bool:
    """Another parameter is left out on each rank, and one on all of them."""
    return i != 4 and (i + rank + round) % 3 != 0


def test_a_parameter_without_gradient_counts_as_zero(pool: WorkerPool) -> None:
    """It delays neither its own bucket nor later ones, whatever gradients the other ranks have."""
    size, n_rounds = 3, 3
    want = [
        [sum(10.0 * r + i for r in range(size) if gets(i, r, round)) for i in range(7)]
        for round in range(n_rounds)
    ]
    assert [row[4] for row in want] == [0.0] * n_rounds
    for found in pool.run(size, with_gaps, n_rounds):
        assert found == want


def test_one_replica_sums_nothing() -> None:
    """No hook is left on its parameters."""
    parameter = nn.Parameter(torch.ones(3))
    sums = GradientSums([(Axis("dp"), [parameter])], [parameter])
    assert not sums.parameters
    with sums.backward():
        (2 * parameter).sum().backward()
    sums.finish()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2.0] * 3


# --------------------------------------------------- sums over rows, in half precision

GRID: Layout = {"scheme": "megatron_2d", "rows": 2, "cols": 2}
IN_BACKWARD = {"update": "in_backward", "clip_by": "layer"}
WAIT: dict[str, tuple[Layout, dict[str, Any], bool]] = {
    "one pass": (GRID, {}, True),
    "two passes": ({**GRID, "micro_batches": 2}, {}, False),
    "two replicas": (OPTIMUS, {}, False),
    "updated in backward": (GRID, IN_BACKWARD, False),
    "cast at each use": (GRID, {"cast": "use"}, False),
}


def casts_of(layout: Layout, train: dict[str, Any]) -> tuple[bool, list[int], bool]:
    """Return whether a step casts gradients together, how many, and if they are as otherwise."""
    model, axes, plan = exactness.built(layout, CONFIG, "bfloat16")
    for copy in filter(None, map(copy_of, model.parameters())):
        copy.once = train.get("cast") != "use"
    stepper = Stepper(model, TrainConfig(global_batch=8, dtype="bfloat16", **train), axes, plan)
    batch = exactness.batches_of(0, CONFIG, 8)
    found, casts, does = [], [], stepper.kept.casts_together
    for together in (does, False):
        stepper.kept.casts_together = together
        with patch.object(torch, "_foreach_copy_", wraps=torch._foreach_copy_) as calls:
            stepper.repeat(0, lambda rows: {key: value[rows] for key, value in batch.items()})
        targets = [call.args[0] for call in calls.call_args_list]
        casts += [len(each) for each in targets if each[0].dtype == torch.float32]
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    got, want = found
    return does, casts, len(got) == len(want) and all(map(torch.equal, got, want))


@pytest.mark.parametrize("case", WAIT)
def test_sums_over_rows_become_gradients_in_one_kernel(pool: WorkerPool, case: str) -> None:
    """No product before leaves it the sum of the first one, whose gradient does not wait."""
    layout, train, waits = WAIT[case]
    for does, casts, equal in pool.run(4, casts_of, layout, train):
        assert does == waits
        assert casts == ([4 * CONFIG.n_layers - 1] if waits else [])
        assert equal


# --------------------------------------------------- parameters that stages share

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
    config, plan = (
        exactness.tiny(max_seq_len=8, n_layers=3, **MODELS[family]),
        LayoutConfig(**layout),
    )
    axes, made_a_difference = exactness.axes_of(plan), False
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

    model = build_parallel(config, plan, axes, 1, exactness.CPU)
    stepper = Stepper(model, TrainConfig(global_batch=6), axes, plan)
    batch = exactness.batches_of(0, config, 6)
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
