"""Replicas that shard optimizer state (zero1), or parameters too (fsdp): casts, errors, hooks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gridformer.config import LayoutConfig
from gridformer.models.blocks import Layer
from gridformer.parallel.data.zero import replica_part, stored
from gridformer.utils.errors import DivergedError
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.replicas import (
    SINGLE,
    Layout,
    in_memory,
    read_of,
    settings_of,
)
from tests.support.multirank.runs import plan_of, train
from tests.support.multirank.runs import stored as stored_by


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
        assert "gathered_weights_scope" in text


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


# --------------------------------------------------------------------------- checkpoints


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
