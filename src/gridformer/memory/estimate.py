"""Estimates the memory of a rank during a step before anything is allocated, from its record.

The record is made by the rank's own code on tensors without memory (gridformer.record.step). So
the estimate is valid for every scheme and setting, and for any number of ranks. It covers the
memory of torch's kernels, of gridformer's own, and of the messages of NCCL or gloo, by kind:

parameters, gradients, optimizer    kept from step to step; the parameters with the copies in the
                                    type of the computation that a step makes of them
activations                         made in a forward pass and kept for its backward pass, by the
                                    kind of module that made them
recomputed                          activations that a backward pass recomputes
workspace                           everything else: tensors that live within one pass, and messages
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gridformer.config import RunConfig
from gridformer.memory.room import on_gpu
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.record.device import Backend
from gridformer.record.events import Held
from gridformer.record.rank import RankRecord, record_ranks
from gridformer.record.step import ACTIVATIONS, KINDS, Extent, RecordOptions
from gridformer.utils.process import on_all_cores

_POINTS = 1500  # points of a timeline
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
Bytes = NDArray[np.int64]


class Changes(NamedTuple):
    """How memory changes in a part of a step.

    Attributes:
        kind: The kind of the part; see `gridformer.record.step.StepPart`.
        n_bytes: By how many bytes it grows, [changes].
        kinds: Which of `KINDS` is allocated or freed, [changes].
    """

    kind: str
    n_bytes: Bytes
    kinds: Bytes
    doing: list[str]


def changes_of(record: RankRecord) -> list[Changes]:
    """Returns the changes of memory in each part of a rank's step."""
    parts = {n: part for n in {*record.order} if (part := record.step.parts[n]).kind != "start"}
    changes = {}
    for number, part in parts.items():
        some = [event for event in part.events if isinstance(event, Held)]
        changes[number] = Changes(
            part.kind,
            np.array([one.n_bytes for one in some], dtype=np.int64),
            np.array([_NUMBERS[one.kind] for one in some], dtype=np.int64),
            [one.doing for one in some],
        )
    return [changes[number] for number in record.order if number in changes]


@dataclass(frozen=True)
class Timeline:
    """Bytes over time, by kind.

    Time counts allocations and frees. The timeline is divided into intervals, and the moment with
    the most bytes represents each of them.

    Attributes:
        times: The moments.
        bytes_of: For each kind, its bytes at these moments.
        phases: (time at which a phase of the step begins, its name).
    """

    times: list[int]
    bytes_of: dict[str, list[int]]
    phases: list[tuple[int, str]]


@dataclass(frozen=True)
class MemoryBreakdown:
    """The bytes of one rank during one optimizer step.

    Attributes:
        peak: The most bytes that it holds at a time.
        moment: What the rank was doing at the peak.
        by_kind: The bytes at the peak by kind.
        between: The bytes held between steps.
        host: The bytes that lie in host memory (train.offload). No other number contains them.
        saved: The bytes of the copies from which a checkpoint is written while training goes on
            (train.async_save), in host memory. No other number contains them.
        saved_beside: Whether these copies lie in the same memory as all else, as on CPUs.
    """

    rank: int
    peak: int
    moment: str
    by_kind: dict[str, int]
    between: int
    host: int
    timeline: Timeline = field(repr=False)
    saved: int = 0
    saved_beside: bool = False

    @property
    def needed(self) -> int:
        """The bytes that the device of the rank must have."""
        return self.peak + (self.saved if self.saved_beside else 0)

    @property
    def activations(self) -> int:
        """The bytes of all activations at the peak."""
        return sum(self.by_kind.get(kind, 0) for kind in ACTIVATIONS)


def breakdown_of(record: RankRecord, saved_beside: bool, timeline: bool = True) -> MemoryBreakdown:
    """Returns the breakdown of a record with storages; its timeline takes time to make.

    Raises:
        UserError: The step fails.
    """
    memory, parts = record.step, changes_of(record)
    if not parts:
        raise record.trace.failure
    n_bytes = np.concatenate([np.zeros(1, dtype=np.int64), *(part.n_bytes for part in parts)])
    kinds = np.concatenate([np.zeros(1, dtype=np.int64), *(part.kinds for part in parts)])
    between = sum(memory.between.values())
    curve = between + n_bytes.cumsum()
    when = int(curve.argmax())
    by_kind = np.bincount(kinds[: when + 1], n_bytes[: when + 1], len(KINDS)).astype(np.int64)
    for kind, held in memory.between.items():
        by_kind[KINDS.index(kind)] += held
    begins = [1, *itertools.accumulate((len(part.n_bytes) for part in parts), initial=1)][1:]
    return MemoryBreakdown(
        record.trace.rank,
        int(curve[when]),
        _moment(parts, when, begins, memory.composed),
        {kind: int(n) for kind, n in zip(KINDS, by_kind) if n},
        between,
        memory.host,
        _timeline(parts, memory.between, n_bytes, kinds, begins)
        if timeline
        else Timeline([], {}, []),
        memory.saved,
        saved_beside,
    )


def _moment(parts: Sequence[Changes], when: int, begins: list[int], composed: bool) -> str:
    """Names the module that ran at a time, or else the part of the step."""
    if not when:
        return "between steps"
    number = next(i for i, begin in enumerate(begins[1:]) if when < begin)
    # A place is noted with the change before which it was left.
    after = next((i for i, begin in enumerate(begins[1:]) if when + 1 < begin), number)
    at = when + 1 - begins[after]
    place = parts[after].doing[at] if at < len(parts[after].doing) else ""
    doing = place.partition("|")[2]
    if doing:
        layer = re.sub(r"\w*(layers|blocks)\.\d+(\.?)", "a layer\\2", doing)
        return layer.replace("layer.", "layer's ") if composed else doing
    part = parts[number].kind
    passes = {kind: f"{kind}, embedding or loss" for kind in ("forward", "backward")}
    passes["weight"] = "gradients of weights"
    return passes.get(part, part or "between steps")


def _timeline(
    parts: Sequence[Changes],
    between: Mapping[str, int],
    n_bytes: Bytes,
    kinds: Bytes,
    begins: list[int],
) -> Timeline:
    curves = {}
    for number, kind in enumerate(KINDS):
        of_kind = np.where(kinds == number, n_bytes, 0)
        curves[kind] = between.get(kind, 0) + of_kind.cumsum()
    total = np.sum([*curves.values()], axis=0)
    edges = np.unique(np.linspace(0, len(total), min(_POINTS, len(total)) + 1).astype(int))
    kept = [a + int(total[a:b].argmax()) for a, b in itertools.pairwise(edges)]
    phases: list[tuple[int, str]] = []
    for begin, part in zip(begins, parts):
        if part.kind and (not phases or phases[-1][1] != part.kind):
            phases.append((begin - 1, part.kind))
    return Timeline(
        kept,
        {kind: curve[kept].tolist() for kind, curve in curves.items() if curve.any()},
        phases,
    )


# --------------------------------------------------------------------------- estimates


def estimate_ranks(
    run: RunConfig, ranks: Sequence[int], decisions: Decisions | None = None
) -> list[MemoryBreakdown]:
    """Estimates the breakdowns of some ranks of a checked run, on all cores where that is possible.

    `decisions` are the result of `decide_run(run)`; None calls it.
    """
    decisions = decisions or decide_run(run)

    def estimated(some: Sequence[int]) -> list[MemoryBreakdown]:
        return [estimate_rank(run, rank, decisions) for rank in some]

    return on_all_cores(estimated, ranks)


def estimate_rank(
    run: RunConfig,
    rank: int,
    decisions: Decisions | None = None,
    complete: bool = False,
    timeline: bool = True,
) -> MemoryBreakdown:
    """Estimates the breakdown of one rank over one optimizer step.

    It registers a device type in this process, which must not belong to a process group.

    Args:
        run: The checked run.
        rank: The rank.
        decisions: The result of `decide_run(run)`; None calls it.
        complete: Whether the step runs as a whole; otherwise it is composed from short ones.
        timeline: Whether the breakdown has its timeline, which takes time to make.
    """
    gpu = on_gpu(run)
    backend: Backend = "nccl" if gpu else "gloo"
    extent: Extent = "complete" if complete else "composed"
    how = RecordOptions(backend, storages=True, extent=extent)
    [record] = record_ranks(run, [[rank]], decisions or decide_run(run), how)
    return breakdown_of(record, not gpu, timeline)
