"""Bounds of the memory of any rank of a run, by formulas of its config alone."""

from __future__ import annotations

import math

from gridformer.config import RunConfig
from gridformer.memory.room import Room
from gridformer.parallel.auto.products import parameter_bytes, state_bytes
from gridformer.parallel.registry import spec_of
from gridformer.utils.units import format_bytes


def beyond_saving(run: RunConfig, room: Room) -> list[str]:
    """Returns why a run cannot fit with any settings that save memory, if its sizes alone show it.

    It does not load torch: gpt-175b is refused on a laptop in less time than torch takes to load.

    Args:
        run: The checked run.
        room: The budget of each process.

    Returns:
        One problem if the shards of matrices and of their moments alone exceed the budget, with
        FSDP and without gradients; otherwise none, and `gridformer.memory.budget.fit_problems`
        looks closer.
    """
    layout, elements = run.layout, run.model.matrix_elements
    devices = layout.pp * math.prod(spec_of(layout).grid(layout))
    moments = 2 if run.train.device == "cpu" else 0  # which a GPU may leave to its host
    least = elements / devices / layout.dp * (1 + moments) * parameter_bytes(run)
    if least <= room.n_bytes:
        return []
    each = state_bytes(run, layout.dp)
    alone = format_bytes(round(elements / devices * each))
    return [
        f"a rank would hold {alone} of parameters, gradients and optimizer alone; but {room.why}: "
        f"{enough_devices(elements * each, room)}"
    ]


def enough_devices(n_bytes: float, room: Room) -> str:
    """Returns the remedy for a run whose parameters, gradients and optimizer are too large.

    Args:
        n_bytes: What these take on all devices of a replica.
        room: The budget of each process.
    """
    devices = math.ceil(n_bytes / max(1, room.n_bytes))
    return (
        f"no setting that saves memory is enough; use a layout of {devices:,} or more devices of "
        "this size"
    )


def upper_bound(run: RunConfig) -> int:
    """Returns an upper bound of the bytes that any rank of the run holds at a time.

    It assumes that nothing is sharded over the grid, and several times as many activations as any
    block keeps.
    """
    from gridformer.models import count_parameters

    model, layout, train = run.model, run.layout, run.train
    parameters = count_parameters(model)
    size = 8 if train.dtype == "float64" else 4
    sequences = train.global_batch // (layout.dp * layout.micro_batches)
    under_way = layout.micro_batches if layout.pp > 1 else 1
    s, source = run.seq_len, run.source_len
    wide = 40 * model.hidden_size + 20 * model.n_heads * model.head_width
    wide += (12 + 12 * model.gated) * model.ffn_size
    scores = 16 * model.n_heads * (s * s + s * source + source * source)
    stacks = 2 if model.two_stacks else 1
    a_layer = sequences * (wide * (s + source) + scores) * stacks
    logits = 12 * sequences * s * model.vocab_size
    # The integers from which dropout masks are made: 8 bytes each, many per element.
    masks = 16 * 8 * sequences * ((s + source) * max(model.hidden_size, model.ffn_size) + scores)
    activations = (a_layer * (model.n_layers + 1) * under_way + logits) * size
    states = 10 + 3 * train.saves_meanwhile
    return states * parameters * size + activations + masks
