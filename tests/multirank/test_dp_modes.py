"""Replicas that shard optimizer state (zero1), or parameters too (fsdp): memory and messages."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gridformer.comm import record_messages
from gridformer.config import LayoutConfig
from gridformer.models.blocks import Layer
from gridformer.parallel.data import buckets as bucketing
from gridformer.parallel.data.copies import share_parts
from gridformer.parallel.data.zero import replica_part
from gridformer.parallel.sharding import shard_of
from tests.support.marks import full_unless
from tests.support.memory_log import MemoryLog
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.replicas import (
    EVEN,
    FIRST,
    MEGATRON,
    ODD,
    SINGLE,
    THREE,
    Layout,
    in_memory,
    read_of,
    settings_of,
)
from tests.support.multirank.runs import plan_of, train
from tests.support.multirank.runs import stored as stored_by


@dataclass
class Memory:
    """Elements that a device holds, of each kind between steps, and the most within one step.

    Attributes:
        share: This replica's share if every tensor is sharded by rows.
        layers: Layers that are whole at the same time within a step.
        sent: Whole gradients that are left after a step although their sums are elsewhere.
    """

    whole: int
    share: int
    parameters: int = 0
    gradients: int = 0
    state: int = 0
    layers: int = 0
    whole_gradients: int = 0
    sent: int = 0


def memory_of(layout: Layout, model: dict[str, Any]) -> Memory:
    built, axes, stepper = settings_of(layout, 4, **model)
    parameters = [*built.parameters()]
    shares = []
    for p in parameters:
        axis = axes[shard_of(p).replicas or ""]
        rows = p.shape[1] if shard_of(p).transposed else p.shape[0]
        each = -(-rows // axis.size)
        shares.append(min(each, max(0, rows - each * axis.index)) * (p.numel() // rows))
    found = Memory(sum(p.numel() for p in parameters), sum(shares))
    inside = [module for module in built.modules() if isinstance(module, Layer)]

    def look(_: Any) -> None:
        held = [layer for layer in inside if any(in_memory(p) for p in layer.parameters())]
        found.layers = max(found.layers, len(held))
        grads = sum(p.grad.numel() for p in parameters if p.grad is not None)
        found.whole_gradients = max(found.whole_gradients, grads)

    for layer in inside:
        layer.norm2.register_forward_pre_hook(lambda *_: look(None))
    for p in parameters:
        p.register_post_accumulate_grad_hook(look)
    for step in range(2):
        stepper(step, read_of(built, step))
    stepper.evaluate([read_of(built, 0)])
    parts = [part for part in map(replica_part, parameters) if part is not None]
    storages = {t.untyped_storage().data_ptr(): in_memory(t) for t in [*parameters, *parts]}
    found.parameters = sum(storages.values())
    found.gradients = sum(t.grad.numel() for t in [*parameters, *parts] if t.grad is not None)
    cut = [p for p in parameters if replica_part(p) is not None]
    found.sent = sum(p.grad.numel() for p in cut if p.grad is not None)
    state = stepper.updates.state.values()
    moments = [s[name] for s in state for name in ("exp_avg", "exp_avg_sq")]
    found.state = sum(in_memory(moment) for moment in moments)
    return found


HELD = {
    "2": (SINGLE, EVEN),
    "3-odd": (THREE, ODD),
    "megatron": (MEGATRON, EVEN),
    "first-odd": (FIRST, ODD),
}
HELD_CASES = [
    (name, mode, micro_batches, sync)
    for name in HELD
    for mode in ("replicate", "zero1", "fsdp")
    for micro_batches, sync in ((1, "step"), (3, "step"), (3, "micro_batch"))
    if mode != "replicate" or sync == "step"
]
QUICK_HELD = [
    ("megatron", "fsdp", 1, "step"),
    *(case for case in HELD_CASES if case[0] == "3-odd" and case[2:] != (3, "step")),
]


@pytest.mark.parametrize(
    "case",
    full_unless(QUICK_HELD.__contains__, HELD_CASES),
    ids=lambda case: "-".join(map(str, case)),
)
def test_what_a_device_holds(pool: WorkerPool, case: tuple[str, str, int, str]) -> None:
    """Optimizer state and gradients, or everything, take exactly 1/d of the elements."""
    name, mode, micro_batches, sync = case
    layout, model = HELD[name]
    how = {**layout, "dp_mode": mode, "micro_batches": micro_batches, "gradient_sync": sync}
    plan = LayoutConfig(**how)
    held = pool.run(plan.n_processes, memory_of, plan.model_dump(), model)
    for one in held:
        cut = mode != "replicate"
        assert one.sent == 0, "also of copies, whose sums only their owner has"
        if "cols" not in layout:  # where copies are not updated
            assert one.state == 2 * (one.share if cut else one.whole)
            assert one.gradients == (one.share if cut else one.whole)
        assert one.parameters == (one.share if mode == "fsdp" else one.whole)
        if mode == "fsdp":
            assert one.layers <= 2, "one that computes, and one that is about to"
        if cut and (micro_batches == 1 or sync == "micro_batch") and "cols" not in layout:
            assert one.whole_gradients < one.whole / 2, "those that have been sent are let go of"
    if model is EVEN and mode != "replicate":
        assert {one.share for one in held} <= {one.whole // 2 for one in held}


# --------------------------------------------------- zero1's gathers


def while_gathering() -> tuple[int, int, int]:
    """Return the most bytes that `share_parts` holds at a time, those of a bucket, and buckets."""
    built, axes, _ = settings_of({**SINGLE, "dp_mode": "zero1"}, 6, **EVEN)
    parameters = [*built.parameters()]
    n_bytes = max(p.numel() for p in parameters) * 4
    with patch.object(bucketing, "BUCKET_BYTES", n_bytes):
        n_buckets = len([*bucketing.buckets(parameters)])
        with MemoryLog() as tracker:
            tracker.mark(parameters, "parameters")
            held = tracker.live()
            share_parts([parameters], axes)
    return tracker.peak() - held, n_bytes, n_buckets


def test_gathers_of_updated_parameters_hold_few_of_them_twice(pool: WorkerPool) -> None:
    """Two messages at a time, and what arrives of one of them: not all parameters."""
    for most, bucket, n_buckets in pool.run(2, while_gathering):
        assert n_buckets > 8
        assert bucket < most <= 4 * bucket


# --------------------------------------------------- volumes


@dataclass
class Traffic:
    """Traffic of one rank: elements and kinds of collectives by label.

    `in_layers` and `outside` are the elements of a replica's share, in layers and outside them.
    """

    moved: dict[str, float]
    kinds: dict[str, set[str]]
    in_layers: int
    outside: int


def traffic_of(layout: Layout, model: dict[str, Any]) -> Traffic:
    built, axes, stepper = settings_of(layout, 2, **model)
    inside, outside = 0, 0
    for name, p in built.named_parameters():
        rows = p.shape[1] if shard_of(p).transposed else p.shape[0]
        share = -(-rows // axes.dp.size) * (p.numel() // rows)
        inside, outside = inside + share * ("layers." in name), outside + share
    with record_messages() as recorder:
        stepper(0, read_of(built, 0))
    labels = ("gradients", "parameters")
    return Traffic(
        {label: recorder.moved(label) for label in labels},
        {label: set(recorder.count(label)) for label in labels},
        inside,
        outside - inside,
    )


VOLUMES = {
    "2-even-1": (SINGLE, EVEN, 1),
    "3-odd-3": (THREE, ODD, 3),
    "2-odd-3": (SINGLE, ODD, 3),
    "3-even-1": (THREE, EVEN, 1),
    "3-odd-1": (THREE, ODD, 1),
}


@pytest.mark.parametrize("case", full_unless(lambda case: case in [*VOLUMES][:2], VOLUMES))
def test_volumes(pool: WorkerPool, case: str) -> None:
    """A step of P parameters over d replicas moves (d-1)/d P each of gradients and of parameters.

    That is an all-reduce, whatever the number of micro-batches. Under fsdp, layers are gathered
    twice per micro-batch: 3 (d-1)/d P in all if nothing is outside the layers. If they stay until
    the step ends, they are gathered once. If each micro-batch sums its gradients, those travel as
    often.
    """
    layout, model, micro_batches = VOLUMES[case]
    d = layout["dp"]
    for mode, reshard, sync in (
        ("zero1", "layer", "step"),
        ("fsdp", "layer", "step"),
        ("fsdp", "step", "micro_batch"),
    ):
        plan = {**layout, "dp_mode": mode, "reshard": reshard, "micro_batches": micro_batches}
        plan["gradient_sync"] = sync
        sums = micro_batches if sync == "micro_batch" else 1
        for one in pool.run(d, traffic_of, plan, model):
            every = one.in_layers + one.outside
            assert one.moved["gradients"] == sums * (d - 1) * every
            times = 2 * micro_batches if (mode, reshard) == ("fsdp", "layer") else 1
            assert one.moved["parameters"] == (d - 1) * (times * one.in_layers + one.outside)
            assert one.kinds == {"gradients": {"reduce_scatter"}, "parameters": {"all_gather"}}


def sums_in_levels(layout: Layout) -> dict[str, float]:
    """Return the elements that this rank receives in a step over each axis of replicas."""
    built, _, stepper = settings_of(layout, 2, **EVEN)
    with record_messages() as recorder:
        stepper(0, read_of(built, 0))
    found: dict[str, float] = {"parameters": sum(p.numel() for p in built.parameters())}
    for one in recorder.records:
        if one.label in ("gradients", "parameters"):
            found[f"{one.op} {one.axis}"] = found.get(f"{one.op} {one.axis}", 0.0) + one.moved
    return found


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_two_levels_gather_inside_and_sum_parts_across(pool: WorkerPool, sync: str) -> None:
    """Of P parameters, P / N are all-reduced over d / N groups once a step, whatever travels in."""
    layout = {"dp": 6, "dp_mode": "fsdp", "shard_over": 2, "micro_batches": 3}
    for found in pool.run(6, sums_in_levels, {**layout, "gradient_sync": sync}):
        part = found.pop("parameters") / 2
        assert found["all_reduce dp_replicate"] == 2 * 2 / 3 * part
        assert found["reduce_scatter dp_shard"] == part * (3 if sync == "micro_batch" else 1)
        assert {*found} == {
            "all_gather dp_shard",
            "reduce_scatter dp_shard",
            "all_reduce dp_replicate",
        }


# --------------------------------------------------- overlap


def sent_when(layout: Layout) -> tuple[list[int], int, dict[str, list[int]]]:
    """Record what is in flight during a step.

    Returns the gradient sums that had started when the first layer's gradient came, by micro-batch;
    their number in the whole step; and the gathers that had started when each layer computed, in
    forward and in backward.
    """
    built, _, stepper = settings_of(layout, 3)
    early: list[int] = []
    gathers: dict[str, list[int]] = {"forward": [], "backward": []}
    with record_messages() as recorder:

        def note(way: str) -> None:
            gathers[way].append(recorder.count("parameters").total())

        for layer in built.modules():
            if isinstance(layer, Layer):
                layer.norm1.register_forward_pre_hook(lambda *_: note("forward"))
                layer.mlp.register_full_backward_pre_hook(lambda *_: note("backward"))
        first = built.get_parameter("layers.0.attention.qkv.weight")
        first.register_post_accumulate_grad_hook(
            lambda _: early.append(recorder.count("gradients").total())
        )
        stepper(0, read_of(built, 0))
    return early, recorder.count("gradients").total(), gathers


@pytest.mark.parametrize("mode", ["replicate", "zero1", "fsdp"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_messages_travel_while_layers_compute(
    pool: WorkerPool, mode: str, micro_batches: int
) -> None:
    """Gradients travel in the last backward pass; the next layer's parameters in every pass."""
    layout = {**SINGLE, "dp_mode": mode, "micro_batches": micro_batches}
    for early, total, gathers in pool.run(2, sent_when, layout):
        assert early[:-1] == [0] * (micro_batches - 1)
        assert 1 <= early[-1] < total
        if mode == "fsdp":
            # One gather for all outside layers; before a layer computes, its own and the next
            # layer's.
            assert gathers["forward"][:3] == [3, 4, 4]
            assert gathers["backward"][:3] == [6, 7, 7]


# --------------------------------------------------- casts and errors


def parts_after(layout: Layout) -> list[Tensor]:
    """Return this replica's parts of all parameters after two steps in bfloat16."""
    built, _, stepper = settings_of(layout, 2, "bfloat16", dropout=0.2)
    for step in range(2):
        stepper(step, read_of(built, step))
    return [part.detach() for p in built.parameters() if (part := replica_part(p)) is not None]


INPUTS_STAY = {"scheme": "optimus", "cols": 2, "dp": 2, "stationary": "input"}


@pytest.mark.parametrize(
    "below",
    full_unless(
        lambda layout: layout is not SINGLE and layout["keep_gathered"] == "none",
        [SINGLE, *({**INPUTS_STAY, "keep_gathered": keep} for keep in ("none", "weights"))],
    ),
    ids=["single", "transposed weights", "transposed weights, gathered early"],
)
def test_what_fsdp_gathers_in_bfloat16_is_what_zero1_casts(pool: WorkerPool, below: Layout) -> None:
    """The float32 parameters of its layers have no memory, so nothing may take views of them."""
    layout = {**below, "micro_batches": 3}
    n = LayoutConfig(**layout).n_processes
    zero1, fsdp = (
        pool.run(n, parts_after, {**layout, "dp_mode": mode}) for mode in ("zero1", "fsdp")
    )
    for want, got in zip(zero1, fsdp):
        assert want
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


# --------------------------------------------------- errors


def outside(layout: Layout) -> str:
    built, _, _ = settings_of(layout, 1)
    try:
        built.losses(read_of(built, 0)(slice(0, 2)))
    except RuntimeError as error:
        return str(error)
    return ""


def test_parameters_that_are_not_gathered_are_not_read(pool: WorkerPool) -> None:
    for text in pool.run(2, outside, {**SINGLE, "dp_mode": "fsdp"}):
        assert "dp_mode=fsdp" in text
        assert "gathered_weights_scope" in text


# --------------------------------------------------- checkpoints


def test_a_part_is_written_once(pool: WorkerPool, token_folder: Path, tmp_path: Path) -> None:
    """The replica that updates a block writes it: all elements of all tensors, once."""
    sizes = []
    for mode in ("replicate", "zero1", "fsdp"):
        layout = {"scheme": "single", "dp": 3, "dp_mode": mode}
        out = tmp_path / mode
        pool.run(3, train, plan_of(token_folder, out, layout))
        blocks = stored_by(out)
        sizes.append(sum(block.numel() for block in blocks.values()))
        most = max(block.shape[0] for (name, _), block in blocks.items() if "tokens" in name)
        assert most == (301 if mode == "replicate" else 101)
    assert len({*sizes}) == 1
