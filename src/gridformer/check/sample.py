"""Which part of a large run is enough to check it: equal ranks, layers and micro-batches once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.axes import mesh_ranks
from gridformer.parallel.pipeline.partition import model_outline, stages_of
from gridformer.parallel.pipeline.stages import inputs_of
from gridformer.record.events import Event, Start

MOST = 64  # with more ranks, equal ones are traced once
_LAYERS = 2  # of a stage; without a pipeline one more, so that there is one in the middle


def shorter(run: RunConfig) -> RunConfig:
    """Reduces layers and micro-batches to numbers from which on a step only repeats itself.

    The size of a micro-batch stays the same.
    """
    layout, model = run.layout, run.model
    n_stages = layout.n_stages
    layers = _LAYERS * n_stages if layout.pp > 1 else _LAYERS + 1
    most = {"gpipe": layout.pp + 2, "1f1b": layout.pp + 2, "interleaved": 3 * layout.pp}
    n = min(layout.micro_batches, most[layout.pipeline_order] if layout.pp > 1 else 3)
    batch = run.train.global_batch // layout.micro_batches * n
    fewer = {name: min(getattr(model, name), layers) for name in ("n_layers", "n_decoder_layers")}
    return run.model_copy(
        update={
            "model": model.model_copy(update=fewer),
            "layout": layout.model_copy(update={"micro_batches": n}),
            "train": run.train.model_copy(update={"global_batch": batch}),
        }
    )


def sample_ranks(run: RunConfig, decisions: Decisions, most: int = MOST) -> list[list[int]]:
    """Returns the ranks that represent all ranks of a run.

    Every stage of a pipeline has an order of messages of its own, so the first rank of each is
    among them. On the first and the last stage, so are the ranks that are last along one other
    axis, each of which is in a group with the first rank.

    Args:
        run: The run.
        decisions: The result of `decide_run`.
        most: If the run has at most this many ranks, all are returned, each in a list of its own.

    Returns:
        Lists of ranks that differ only in their place along pp and whose stages have equal layers.
    """
    layout = run.layout
    if layout.n_processes <= most:
        return [[rank] for rank in range(layout.n_processes)]
    mesh = mesh_ranks(layout, decisions.block)
    found = [
        [int(mesh[place].flatten()[0]) for place in places]
        for places in alike_stages(run, decisions)
    ]
    others = set()
    for stage in (mesh[0], mesh[-1]):
        for dim, size in enumerate(stage.shape):
            place = [0] * stage.dim()
            place[dim] = size - 1
            others.add(int(stage[tuple(place)]))
    first = {rank for line in found for rank in line}
    return [*found, *([rank] for rank in sorted(others - first))]


def alike_stages(run: RunConfig, decisions: Decisions) -> list[list[int]]:
    """Returns the places along pp, in one list for all places whose stages do the same.

    They have equal layers and equal inputs, and so have the stages after them.
    """
    layout = run.layout
    if layout.pp == 1:
        return [[0]]
    stages = stages_of(run.model, layout.n_stages, decisions.choices.work)
    links = model_outline(run.model).links()
    names = [link.name.rstrip("0123456789") for link in links]
    found: dict[Hashable, list[int]] = {}
    for place in range(layout.pp):
        held = tuple(
            (
                tuple(names[i] for i in stage),
                *(tuple(inputs_of(links, at)) for at in (stage.start, stage.stop)),
            )
            for stage in stages[place :: layout.pp]
        )
        found.setdefault(held, []).append(place)
    return [*found.values()]


def among(programs: Mapping[int, Sequence[Event]]) -> dict[int, list[Event]]:
    """Returns the programs as if there were no other ranks than theirs.

    Groups lose the ranks that were not traced, which do what those do that represent them. Messages
    to and from such ranks are left out.
    """
    known = set(programs)
    return {rank: [_among(event, known) for event in events] for rank, events in programs.items()}


def _among(event: Event, known: set[int]) -> Event:
    if not isinstance(event, Start):
        return event
    at = [i for i, rank in enumerate(event.ranks) if rank in known]
    if len(at) == len(event.ranks):
        return event
    pieces = event.pieces
    if pieces is not None:
        sent, received = (tuple(sizes[i] for i in at) for sizes in pieces)
        pieces = sent, received
    return event._replace(
        ranks=tuple(event.ranks[i] for i in at),
        parts=tuple(part for part in event.parts if part.peer in known),
        pieces=pieces,
    )
