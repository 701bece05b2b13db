"""Which ranks of a large run are enough to check it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.axes import mesh_ranks
from gridformer.record.events import SingleEvent, Start
from gridformer.record.itineraries import alike_stages

MOST = 64  # with more ranks, equal ones are traced once


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


def among(programs: Mapping[int, Sequence[SingleEvent]]) -> dict[int, list[SingleEvent]]:
    """Returns the programs as if there were no other ranks than theirs.

    Groups lose the ranks that were not traced, which do what those do that represent them. Messages
    to and from such ranks are left out.
    """
    known = set(programs)
    return {rank: [_among(event, known) for event in events] for rank, events in programs.items()}


def _among(event: SingleEvent, known: set[int]) -> SingleEvent:
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
