"""Replicas that shard optimizer state (zero1), or parameters too (fsdp), train as one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gridformer.config import LayoutConfig
from gridformer.models.blocks import Layer
from gridformer.parallel.data.zero import replica_part, stored
from gridformer.utils.errors import DivergedError
from tests.support.marks import full_unless
from tests.support.multirank.exactness import TOLERANCE, compare
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.replicas import (
    FIRST,
    MEGATRON,
    OPTIMUS,
    SEQUENCE,
    SINGLE,
    SUPER,
    THREE,
    Layout,
    in_memory,
    read_of,
    settings_of,
)

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


def parts_after(layout: Layout) -> list[Tensor]:
    """Return this replica's parts of all parameters after two steps in bfloat16."""
    built, _, stepper = settings_of(layout, 2, "bfloat16", dropout=0.2)
    for step in range(2):
        stepper(step, read_of(built, step))
    return [part.detach() for p in built.parameters() if (part := replica_part(p)) is not None]


INPUTS_STAY = {"scheme": "optimus", "cols": 2, "dp": 2, "stationary": "input"}


@pytest.mark.parametrize(
    "below",
    [SINGLE, {**INPUTS_STAY, "keep_gathered": "none"}, {**INPUTS_STAY, "keep_gathered": "weights"}],
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
