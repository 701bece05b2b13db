"""Replicas that shard optimizer state (zero1), or parameters too (fsdp), train as one device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gridformer.comm import record
from gridformer.config import LayoutConfig, TrainConfig
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.models.blocks import Layer
from gridformer.parallel import build_parallel
from gridformer.parallel.data.zero import replica_part, stored
from gridformer.parallel.sharding import shard_of
from gridformer.train.step import ReadRows, Stepper
from gridformer.utils.batch import next_words
from gridformer.utils.errors import DivergedError
from tests.support.marks import full_unless
from tests.support.multirank.exactness import CPU, TOLERANCE, axes_of, batch_of, compare, tiny
from tests.support.multirank.pool import WorkerPool

Layout = dict[str, Any]

SINGLE: Layout = {"scheme": "single", "dp": 2}
THREE: Layout = {"scheme": "single", "dp": 3}
MEGATRON: Layout = {"scheme": "megatron", "cols": 2, "dp": 2}
SEQUENCE: Layout = {**MEGATRON, "sequence_parallel": True}
OPTIMUS: Layout = {"scheme": "optimus", "rows": 2, "cols": 2, "dp": 2}
SUPER: Layout = {"scheme": "subgraph", "branches": 2, "dp": 2}
FIRST: Layout = {**SUPER, "common": "first"}
WEIGHTS_NOT_KEPT: Layout = {**OPTIMUS, "schedule": "gather", "keep_gathered": "none"}
SCHEMES = [
    SINGLE,
    THREE,
    MEGATRON,
    SEQUENCE,
    {"scheme": "megatron_2d", "rows": 2, "cols": 2, "dp": 2},
    SUPER,
    {**SUPER, "dp": 1},  # common layers have replicas, branches have none
    {**SUPER, "attention": "outside", "feed_forward": "common"},
    FIRST,
    # Processes of the second sub-grid hold nothing.
    {**FIRST, "attention": "outside", "feed_forward": "common"},
    OPTIMUS,
    WEIGHTS_NOT_KEPT,
    {**OPTIMUS, "schedule": "gather", "keep_gathered": "all", "stationary": "input"},
    {**OPTIMUS, "schedule": "pipelined"},
    {**OPTIMUS, "schedule": "broadcast", "stationary": "output"},
]
CASES = [
    {**scheme, "dp_mode": mode, "micro_batches": micro_batches}
    for scheme in SCHEMES
    for mode in ("zero1", "fsdp")
    for micro_batches in (1, 3)
]
# Gathered parameters that stay until the step ends.
CASES += [
    {**scheme, "dp_mode": "fsdp", "reshard": "step", "micro_batches": micro_batches}
    for scheme in SCHEMES
    for micro_batches in (1, 3)
]
TRAIN = {
    "global_batch": 36,
    "clip_norm": 0.05,
    "lr": 1e-3,
    "weight_decay": 0.1,
    "adam_eps": 1e-4,
    "dtype": "float64",
}
# Sizes that 3 does not divide, and tables of fewer rows than replicas.
MODEL = {
    "dropout": 0.2,
    "attention_dropout": 0.1,
    "max_seq_len": 8,
    "hidden_size": 40,
    "n_heads": 4,
    "ffn_size": 56,
}


def title(layout: Layout) -> str:
    return "-".join(str(value) for key, value in layout.items() if key != "cols")


def quick(layout: Layout) -> bool:
    """Each mode and each scheme occurs once, on as few processes as possible."""
    schemes = {"fsdp": (THREE, FIRST), "zero1": (THREE, SUPER)}
    micro_batches = {"fsdp": 3, "zero1": 1}
    mode = layout["dp_mode"]
    added = ("dp_mode", "reshard", "micro_batches")
    plain = {k: v for k, v in layout.items() if k not in added}
    if "reshard" in layout:
        return plain == SEQUENCE and layout["micro_batches"] == 3
    if plain == WEIGHTS_NOT_KEPT:
        return mode == "fsdp" and layout["micro_batches"] == 1
    return plain in schemes[mode] and layout["micro_batches"] == micro_batches[mode]


@pytest.mark.parametrize("layout", full_unless(quick, CASES), ids=title)
def test_equals_one_device(pool: WorkerPool, layout: Layout) -> None:
    """Compare loss, gradient norm, every gradient, and weights after some steps, with dropout."""
    n = LayoutConfig(**layout).n_processes
    for rank, worst in enumerate(pool.run(n, compare, layout, MODEL, TRAIN, 2)):
        assert worst["init"] == 0.0, f"rank {rank}: initial weights depend on the layout"
        wrong = {k: v for k, v in worst.items() if not v <= TOLERANCE["float64"]}
        assert not wrong, f"rank {rank}: {wrong}"


FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"family": "bert", "n_labels": 3},
    "t5": {"family": "t5", "n_decoder_layers": 1, "relative_buckets": 8},
    "transformer": {"family": "transformer", "norm_position": "pre"},
}
BELOW = {"replicas": SINGLE, "grid": OPTIMUS, "first": FIRST, "sequence": SEQUENCE}
FAMILY_CASES = [
    (family, below, mode) for family in FAMILIES for below in BELOW for mode in ("zero1", "fsdp")
]


@pytest.mark.parametrize(
    "case",
    full_unless(lambda case: case[1:] == ("replicas", "fsdp"), FAMILY_CASES),
    ids="-".join,
)
def test_every_family_equals_one_device(pool: WorkerPool, case: tuple[str, str, str]) -> None:
    """Cover two stacks, score biases, several losses, and heads with their own parameters."""
    family, below, mode = case
    layout = {**BELOW[below], "dp_mode": mode, "micro_batches": 3}
    model = {**MODEL, **FAMILIES[family]}
    n = LayoutConfig(**layout).n_processes
    for worst in pool.run(n, compare, layout, model, TRAIN, 2):
        assert all(v <= TOLERANCE["float64"] for v in worst.values()), worst


@pytest.mark.parametrize("mode", ["zero1", "fsdp"])
def test_bfloat16_stays_close_to_one_device(pool: WorkerPool, mode: str) -> None:
    """Casts of a weight are made again after every gather."""
    layout = {**SINGLE, "dp_mode": mode}
    for worst in pool.run(2, compare, layout, MODEL, {**TRAIN, "dtype": "bfloat16"}, 3):
        assert worst["init"] == 0.0
        assert worst["loss"] < 2e-3
        assert worst["norm"] < 2e-2


def settings_of(
    layout: Layout, n_layers: int, dtype: Any = "float32", **model: Any
) -> tuple[Model, Axes, Stepper]:
    torch.set_num_threads(1)
    plan = LayoutConfig(**layout)
    axes, config = axes_of(plan), tiny(n_layers=n_layers, max_seq_len=8, **model)
    built = build_parallel(config, plan, axes, 1, CPU, dtype)
    return built, axes, Stepper(built, TrainConfig(global_batch=36, dtype=dtype), axes, plan)


def read_of(model: Model, step: int) -> ReadRows:
    batch = batch_of(step, model.config, 36)
    return lambda rows: next_words(batch[rows])


def parts_after(layout: Layout) -> list[Tensor]:
    """Return this replica's parts of all parameters after two steps in bfloat16."""
    built, _, stepper = settings_of(layout, 2, "bfloat16", dropout=0.2)
    for step in range(2):
        stepper(step, read_of(built, step))
    return [part.detach() for p in built.parameters() if (part := replica_part(p)) is not None]


def test_what_fsdp_gathers_in_bfloat16_is_what_zero1_casts(pool: WorkerPool) -> None:
    layout = {**SINGLE, "micro_batches": 3}
    zero1, fsdp = (
        pool.run(2, parts_after, {**layout, "dp_mode": mode}) for mode in ("zero1", "fsdp")
    )
    for want, got in zip(zero1, fsdp):
        assert want
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


# --------------------------------------------------------------------------- memory


@dataclass
class Memory:
    """Elements that a device holds, of each kind between steps, and the most within one step.

    Attributes:
        share: This replica's share if every tensor is sharded by rows.
        layers: Layers that are whole at the same time within a step.
    """

    whole: int
    share: int
    parameters: int = 0
    gradients: int = 0
    state: int = 0
    layers: int = 0
    whole_gradients: int = 0


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
    state = stepper.updates.state.values()
    moments = [s[name] for s in state for name in ("exp_avg", "exp_avg_sq")]
    found.state = sum(in_memory(moment) for moment in moments)
    return found


def in_memory(tensor: Tensor) -> int:
    """Return the number of elements in a tensor's memory."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


ODD = {"vocab_size": 97, "ffn_size": 100}
EVEN = {"vocab_size": 96}


HELD = {
    "2": (SINGLE, EVEN),
    "3-odd": (THREE, ODD),
    "megatron": (MEGATRON, EVEN),
    "first-odd": (FIRST, ODD),
}
HELD_CASES = [
    (name, mode, micro_batches)
    for name in HELD
    for mode in ("replicate", "zero1", "fsdp")
    for micro_batches in (1, 3)
]


@pytest.mark.parametrize(
    "case",
    full_unless(lambda case: case[0] == "3-odd" and case[2] == 1, HELD_CASES),
    ids=lambda case: "-".join(map(str, case)),
)
def test_what_a_device_holds(pool: WorkerPool, case: tuple[str, str, int]) -> None:
    """Optimizer state and gradients, or everything, take exactly 1/d of the elements."""
    name, mode, micro_batches = case
    layout, model = HELD[name]
    plan = LayoutConfig(**layout, dp_mode=mode, micro_batches=micro_batches)  # type: ignore[arg-type]
    held = pool.run(plan.n_processes, memory_of, plan.model_dump(), model)
    for one in held:
        cut = mode != "replicate"
        if "cols" not in layout:  # where copies are not updated
            assert one.state == 2 * (one.share if cut else one.whole)
            assert one.gradients == (one.share if cut else one.whole)
        assert one.parameters == (one.share if mode == "fsdp" else one.whole)
        if mode == "fsdp":
            assert one.layers <= 2, "one that computes, and one that is about to"
        if cut and micro_batches == 1 and "cols" not in layout:
            assert one.whole_gradients < one.whole / 2, "those that have been sent are let go of"
    if model is EVEN and mode != "replicate":
        assert {one.share for one in held} <= {one.whole // 2 for one in held}


# --------------------------------------------------------------------------- volumes


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
    with record() as recorder:
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
    the step ends, they are gathered once.
    """
    layout, model, micro_batches = VOLUMES[case]
    d = layout["dp"]
    for mode, reshard in (("zero1", "layer"), ("fsdp", "layer"), ("fsdp", "step")):
        plan = {**layout, "dp_mode": mode, "reshard": reshard, "micro_batches": micro_batches}
        for one in pool.run(d, traffic_of, plan, model):
            every = one.in_layers + one.outside
            assert one.moved["gradients"] == (d - 1) * every
            times = 2 * micro_batches if (mode, reshard) == ("fsdp", "layer") else 1
            assert one.moved["parameters"] == (d - 1) * (times * one.in_layers + one.outside)
            assert one.kinds == {"gradients": {"reduce_scatter"}, "parameters": {"all_gather"}}


# --------------------------------------------------------------------------- overlap


def sent_when(layout: Layout) -> tuple[list[int], int, dict[str, list[int]]]:
    """Record what is in flight during a step.

    Returns the gradient sums that had started when the first layer's gradient came, by micro-batch;
    their number in the whole step; and the gathers that had started when each layer computed, in
    forward and in backward.
    """
    built, _, stepper = settings_of(layout, 3)
    early: list[int] = []
    gathers: dict[str, list[int]] = {"forward": [], "backward": []}
    with record() as recorder:

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


@pytest.mark.parametrize("mode", ["zero1", "fsdp"])
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


# --------------------------------------------------------------------------- errors


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
        assert "weights_kept" in text


def diverging(layout: Layout) -> list[bool]:
    """Return whether a step that diverges on one rank changes anything stored on this one."""
    built, axes, stepper = settings_of(layout, 1)
    stepper(0, read_of(built, 0))
    before = [stored(p).detach().clone() for p in built.parameters()]
    if axes.world.index == 1:
        last = built.get_submodule("norm")
        last.register_forward_hook(lambda module, args, out: out * torch.inf)
    with pytest.raises(DivergedError, match="nothing was updated"):
        stepper(1, read_of(built, 1))
    return [torch.equal(a, stored(p)) for a, p in zip(before, built.parameters())]


@pytest.mark.parametrize("mode", ["zero1", "fsdp"])
def test_a_diverging_step_updates_nothing(pool: WorkerPool, mode: str) -> None:
    for same in pool.run(2, diverging, {**SINGLE, "dp_mode": mode}):
        assert all(same)


# --------------------------------------------------------------------------- recomputation


def computed_again(layout: Layout, inside: bool) -> float:
    """Return how far gradients are off if layers are recomputed in the backward pass."""
    found = []
    for again in (False, True):
        built, _, stepper = settings_of(layout, 3)
        for layer in [m for m in built.modules() if isinstance(m, Layer)] if again else []:
            # without the hooks around it, or with them
            name = "forward" if inside else "_call_impl"
            plain = getattr(layer, name)
            setattr(layer, name, partial(checkpoint, plain, use_reentrant=False))
        stepper(0, read_of(built, 0))
        found.append(
            [part.grad for p in built.parameters() if (part := replica_part(p)) is not None]
        )
        assert all(not in_memory(p) for p in built.parameters())
    assert len(found[0]) == len(found[1]) > 0
    return max(float((a - b).abs().max()) for a, b in zip(*found) if a.numel())


@pytest.mark.parametrize("inside", [True, False])
def test_layers_may_be_recomputed(pool: WorkerPool, inside: bool) -> None:
    """Parameters are gathered once for torch.utils.checkpoint around a layer or its forward."""
    layout = {**SINGLE, "dp_mode": "fsdp", "micro_batches": 3}
    assert pool.run(2, computed_again, layout, inside) == [0.0, 0.0]
