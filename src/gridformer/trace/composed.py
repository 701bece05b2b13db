"""The memory of a rank in a complete step, composed from records of short steps.

A short step has few layers, and in a pipeline few passes (gridformer.trace.itineraries). The parts
of a step that are alike are recorded once, and each further layer repeats what the one before it
did (gridformer.trace.segments).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.axes import mesh_ranks
from gridformer.parallel.pipeline.schedules import Itinerary
from gridformer.trace.device import Backend
from gridformer.trace.fewer_layers import removable, without_layers
from gridformer.trace.itineraries import ShortSchedule, alike_chunks, in_order, shortened
from gridformer.trace.segments import NotPeriodicError, segments
from gridformer.trace.step import KINDS, StepPart, kind_of, record_step
from gridformer.trace.tracker import MemoryChange
from gridformer.utils.errors import UserError

_KEPT = (3, 5, 8)  # layers of the shortest stage of the shorter step, in turn until layers repeat
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


class Changes(NamedTuple):
    """How memory changes in a part of a step.

    Attributes:
        kind: The kind of the part; see `gridformer.trace.step.StepPart`.
        n_bytes: By how many bytes it grows, [changes].
        kinds: Which of `KINDS` is allocated or freed, [changes].
        places: What ran then, [changes].
    """

    kind: str
    n_bytes: NDArray[np.int64]
    kinds: NDArray[np.int64]
    places: list[str]


@dataclass(frozen=True)
class StepMemory:
    """The memory of a rank in a step.

    Attributes:
        parts: The parts of the step, in order.
        between: The bytes held between steps, by kind.
        host: The bytes of the optimizer's state that lie in host memory.
        saved: The bytes of copies from which a checkpoint is written while training goes on.
        composed: Whether some layers stand for others, whose names `places` then have.
    """

    parts: list[Changes]
    between: dict[str, int]
    host: int
    saved: int
    composed: bool = False


def step_memory(
    run: RunConfig, rank: int, decisions: Decisions, backend: Backend, complete: bool = False
) -> StepMemory:
    """Returns the memory of a rank in an optimizer step.

    Args:
        run: The checked run.
        rank: The rank.
        decisions: The result of `decide_run(run)`.
        backend: See `record_step`.
        complete: Whether the step is run as a whole, not composed.
    """
    if not complete:
        for kept in _KEPT:
            fewer = removable(run, decisions, kept)
            if not fewer:
                break
            try:
                shorter, longer = (
                    _recorded(run, rank, decisions, backend, n) for n in (fewer, fewer - 1)
                )
                return _with_layers(shorter, longer, fewer - 1)
            except NotPeriodicError:
                pass
    return _recorded(run, rank, decisions, backend, 0, complete)


def _recorded(
    run: RunConfig,
    rank: int,
    decisions: Decisions,
    backend: Backend,
    fewer: int,
    complete: bool = False,
) -> StepMemory:
    """Returns the memory of a step with so many layers fewer in each stage."""
    layout = run.layout
    short: ShortSchedule | None = None
    alike: list[int] = []
    follows: Itinerary | Sequence[int] | None = None
    if not complete and layout.pp > 1:
        stages = mesh_ranks(layout, decisions.block).flatten(1)
        (index,) = (stages == rank).any(1).nonzero().flatten().tolist()
        alike = alike_chunks(run, decisions, index)
        short = shortened([layout], [index], alike=alike)
        follows = short.itinerary
    elif not complete:  # the first makes gradients, and the last one begins their sums
        follows = sorted({0, layout.micro_batches - 1})
    with without_layers(run, decisions, fewer) as part:
        record = record_step(part, rank, decisions, backend, complete=complete, follows=follows)
    if not record.parts:
        raise UserError(
            f"the step of rank {rank} fails: {record.trace.troubles[-1].text}; "
            "`gridformer check` says more"
        )
    parts = [_changes(one) for one in record.parts]
    if short and short.schedules[0]:
        parts = [parts[i] for i in in_order(record.parts, short.schedules[0], layout.pp, alike)]
    parts = [part for part in parts if part.kind != "start"]
    return StepMemory(parts, record.between, record.host, record.saved)


def _changes(part: StepPart) -> Changes:
    changes = [event for event in part.events if isinstance(event, MemoryChange)]
    return Changes(
        part.kind,
        np.array([one.n_bytes for one in changes], dtype=np.int64),
        np.array([_NUMBERS[kind_of(one.entry)] for one in changes], dtype=np.int64),
        [one.place for one in changes],
    )


def _with_layers(shorter: StepMemory, longer: StepMemory, more: int) -> StepMemory:
    """Returns the memory of a step with more layers.

    Args:
        shorter: That of a step with few layers.
        longer: That with a layer more in each stage.
        more: How many layers each stage has besides those of the longer one.

    Raises:
        NotPeriodicError: It does not follow from these two.
    """
    kinds = [[part.kind for part in one.parts] for one in (shorter, longer)]
    if kinds[0] != kinds[1]:
        raise NotPeriodicError("the parts of the step depend on the number of layers")
    known: dict[tuple[int, int], Changes] = {}
    parts = []
    for one, other in zip(shorter.parts, longer.parts):
        key = id(one), id(other)
        if key not in known:
            known[key] = _extended(one, other, more)
        parts.append(known[key])
    between = {kind: n + more * (n - shorter.between[kind]) for kind, n in longer.between.items()}
    return StepMemory(
        parts,
        between,
        longer.host + more * (longer.host - shorter.host),
        longer.saved + more * (longer.saved - shorter.saved),
        composed=True,
    )


def _extended(shorter: Changes, longer: Changes, more: int) -> Changes:
    """Returns a part of a step with more layers; see `_with_layers`."""
    n_kinds = len(KINDS)
    keys = [one.n_bytes * n_kinds + one.kinds for one in (shorter, longer)]
    sizeless = [np.sign(one.n_bytes) * n_kinds + one.kinds for one in (shorter, longer)]
    found: list[tuple[NDArray[np.int64], slice, int]] = []
    for begin, end, repeated, grows in segments(keys[0], keys[1], (sizeless[0], sizeless[1])):
        n_bytes = longer.n_bytes[begin:end]
        if grows:
            n_bytes = n_bytes.copy()
            for place, before in grows:
                grown = longer.n_bytes[place] - shorter.n_bytes[before]
                n_bytes[place - begin] += more * grown
        found.append((n_bytes, slice(begin, end), more if repeated else 1))
    return Changes(
        longer.kind,
        np.concatenate([np.tile(n_bytes, times) for n_bytes, _, times in found]),
        np.concatenate([np.tile(longer.kinds[where], times) for _, where, times in found]),
        [*itertools.chain(*(longer.places[where] * times for _, where, times in found))],
    )
