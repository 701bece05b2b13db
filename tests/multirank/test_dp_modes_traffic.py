"""What replicas send under zero1 and fsdp: as much as an all-reduce, and while layers compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from gridformer.comm import record_messages
from gridformer.models.blocks import Layer
from gridformer.parallel.sharding import shard_of
from tests.support.marks import full_unless
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.replicas import EVEN, ODD, SINGLE, THREE, Layout, read_of, settings_of

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
