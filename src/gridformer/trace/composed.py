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
from gridformer.trace.device import Backend
from gridformer.trace.fewer_layers import removable, without_layers
from gridformer.trace.itineraries import Like, Shortened, shortened
from gridformer.trace.segments import NotPeriodicError, segments
from gridformer.trace.step import KINDS, Part, kind_of, record_step
from gridformer.trace.tracker import Change

_KEPT = (3, 5, 8)  # layers of the shortest stage of the shorter step, in turn until layers repeat
# Bytes of a tensor that stands for joined weights, at most. Torch frees these in any order.
PLACEHOLDER = 8
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


class Changes(NamedTuple):
    """How memory changes in a part of a step.

    Attributes:
        kind: The kind of the part; see `gridformer.trace.step.Part`.
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
    short: Shortened | None = None
    m = layout.micro_batches
    if not complete and layout.pp > 1:
        stages = mesh_ranks(layout, decisions.block).flatten(1)
        (index,) = (stages == rank).any(1).nonzero().flatten().tolist()
        short = shortened(layout, index)
        m = short.micro_batches
    elif not complete:
        m = min(m, 2)  # the first makes gradients, and the last one begins their sums
    each = run.train.global_batch // layout.micro_batches
    part = with_micro_batches(run, m)
    more = (layout.micro_batches - m) * each // layout.dp
    with without_layers(part, decisions, fewer) as part:
        record = record_step(
            part, rank, decisions, backend, complete, short.itinerary if short else None, more
        )
    parts = [_changes(one) for one in record.parts]
    if short:
        parts = _in_order(record.parts, parts, short, layout.pp)
    return StepMemory(parts, record.between, record.host, record.saved)


def with_micro_batches(run: RunConfig, m: int) -> RunConfig:
    """Returns a run with so many micro-batches of the same size."""
    layout, train = run.layout, run.train
    batch = train.global_batch // layout.micro_batches * m
    return run.model_copy(
        update={
            "layout": layout.model_copy(update={"micro_batches": m}),
            "train": train.model_copy(update={"global_batch": batch}),
        }
    )


def _changes(part: Part) -> Changes:
    changes = [event for event in part.events if isinstance(event, Change)]
    return Changes(
        part.kind,
        np.array([one.n_bytes for one in changes], dtype=np.int64),
        np.array([_NUMBERS[kind_of(one.entry)] for one in changes], dtype=np.int64),
        [one.place for one in changes],
    )


def _in_order(
    recorded: Sequence[Part], parts: Sequence[Changes], short: Shortened, pp: int
) -> list[Changes]:
    """Puts the parts of a pipeline's short step in the order of the rank's own schedule."""
    before: list[Changes] = []  # what a pass begins with
    passes: list[tuple[list[Changes], list[Changes]]] = []
    sends: dict[Like, Changes] = {}
    rest: list[Changes] = []
    first, *others = range(len(parts))
    for number in others:
        one, changes = recorded[number], parts[number]
        if one.kind in ("forward", "backward"):
            passes.append(([*before, changes], []))
            before = []
        elif one.kind == "send":
            passes[-1][1].append(changes)
        elif one.kind.endswith(" sent"):  # by the stage before the one that reads it
            kind = one.kind.removesuffix(" sent")
            sender = one.stage - 1 if kind == "forward" else one.stage + 1
            sends.setdefault((kind, sender // pp), changes)
        elif one.kind == "recv":
            before.append(changes)
        else:
            rest.append(changes)
    found = [parts[first]]
    for number, over in short.passes:
        begins, ends = passes[number]
        *received, own = begins
        found += [*received, *(sends[one] for one in over if one in sends), own, *ends]
    return [*found, *(sends[one] for one in short.ends if one in sends), *rest]


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
