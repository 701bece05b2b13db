"""The peak of a rank with many layers, from the logs of two models with few layers.

The longer of these models has one layer more in each stage than the shorter one, or a few if
gradients of several layers travel together (gridformer.memory.layers_per_cycle). In each phase of a
step its log must be that of the shorter one with something inserted, and what is inserted must be
what stands before it, because the layer before did the same. Then each further layer inserts it
once more. Single sizes may differ as well, such as that of a list of norms; they grow along a line.
If the logs differ in any other way, all layers are run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gridformer.config import RunConfig
from gridformer.memory.breakdown import StepLog
from gridformer.memory.estimate import estimate_rank, read_log
from gridformer.memory.layers_per_cycle import (
    LeftOut,
    gradients_of,
    is_worth_it,
    layer_bytes,
    layers_left_out,
    stacks_of,
)
from gridformer.memory.room import on_gpu
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.data.buckets import BUCKET_BYTES
from gridformer.trace.fewer_layers import removable, without_layers
from gridformer.trace.repeated_products import NotRepeatableError
from gridformer.train.step import Stepper

# Layers of the shortest stage of the shorter model, and where sums of gradients wait for others.
KEPT, _WITH_WAITS = 3, 4
# Bytes of a tensor that stands for joined weights, at most. Torch does not always free these in the
# same order.
_PLACEHOLDER = 8
# Bytes of vectors, which may be summed in buckets that do not end with a layer. A bucket of them
# may have `_BUCKETS` times as many.
_SMALL, _BUCKETS = 1 << 20, 16
_NOTICEABLE = 1e-3  # of the peak
_MOST_INSERTED = 12  # places of a phase, such as loops over parameters

Changes = NDArray[np.int64]


def peak_of_rank(run: RunConfig, rank: int, decisions: Decisions) -> int:
    """Returns the bytes that the device of a rank must have, as `estimate_rank` estimates them.

    It may be more, by the small storages that are not there at the peak: at most 0.1%.

    Args:
        run: The checked run.
        rank: The rank.
        decisions: The result of `decide_run(run)`.
    """
    if fewer := removable(run, decisions, _kept(run)):
        with suppress(NotRepeatableError):
            return _from_few_layers(run, rank, decisions, fewer)
    return estimate_rank(run, rank, decisions, timeline=False).needed


def _sums_wait(run: RunConfig) -> bool:
    """Whether sums of gradients may wait for that of a large table.

    See `gridformer.parallel.data.gradients.GradientSums.last_backward`.
    """
    return run.layout.dp > 1 and (run.layout.micro_batches == 1 or not on_gpu(run))


def _kept(run: RunConfig) -> int:
    return _WITH_WAITS if _sums_wait(run) else KEPT


class _OtherLayers(Exception):  # noqa: N818
    """Another number of layers is to be left out."""

    def __init__(self, found: LeftOut) -> None:
        super().__init__()
        self.found = found


def _from_few_layers(run: RunConfig, rank: int, decisions: Decisions, most: int) -> int:
    """Does what `peak_of_rank` does, from two models with few layers.

    Args:
        run, rank, decisions: See `peak_of_rank`.
        most: How many layers may be left out of each stage.

    Raises:
        NotRepeatableError: All layers must be run.
    """
    with without_layers(run, decisions, most) as part:
        few = stacks_of(part, rank, decisions)
    whole, left_out = stacks_of(run, rank, decisions), LeftOut(most, 1)
    if not is_worth_it(most, few, whole):
        raise NotRepeatableError("only few layers can be left out")

    def choose(stepper: Stepper) -> None:
        negligible = _NOTICEABLE * layer_bytes(stepper) / sum(few.values()) * sum(whole.values())
        both_ways = run.layout.dp_mode == "zero1"
        found = layers_left_out(
            gradients_of(stepper),
            few,
            whole,
            _kept(run),
            in_flight=2 if _sums_wait(run) else 1,
            both_ways=both_ways,
            negligible=int(negligible),
        )
        if found != left_out:
            raise _OtherLayers(found)

    def log(fewer: int, before: Callable[[Stepper], object] | None = None) -> _Log:
        with without_layers(run, decisions, fewer) as part:
            return read_log(part, rank, decisions, _Log.of, before=before)

    try:
        shorter = log(most, choose)
    except _OtherLayers as other:
        left_out = other.found
        if not left_out.layers:
            raise NotRepeatableError("buckets do not repeat after few layers") from None
        shorter = log(left_out.layers)
    longer = log(left_out.layers - left_out.cycle)
    more = left_out.layers // left_out.cycle - 1
    for small in (_PLACEHOLDER, _SMALL):
        with suppress(NotRepeatableError):
            return _extended(shorter, longer, more, small)
    return _extended(shorter, longer, more, _BUCKETS * _SMALL)


@dataclass(frozen=True)
class _Log:
    """The log of a step.

    Attributes:
        before: How the bytes change before the step.
        phases: How they change in each phase of the step.
        names: The names of the phases.
        saved: The bytes of copies for a checkpoint that lie in the memory of the device.
    """

    before: Changes
    phases: list[Changes]
    names: list[str]
    saved: int

    @staticmethod
    def of(log: StepLog) -> _Log:
        """Reads the log of a step."""
        changes = log.tracker.differences()
        ends = [log.start, *(end for end, _ in log.phases)]
        return _Log(
            changes[: log.start + 1],
            [changes[begin + 1 : end + 1] for begin, end in itertools.pairwise(ends)],
            [name for _, name in log.phases],
            log.saved if log.saved_beside else 0,
        )

    def without(self, small: int) -> list[Changes]:
        """Returns the changes before the step, and those of each phase without small storages."""
        return [self.before, *(phase[abs(phase) > small] for phase in self.phases)]

    def together(self, small: int) -> int:
        """Returns the most bytes of small storages that the step has at a time."""
        changes = np.concatenate([*self.phases, np.zeros(1, dtype=np.int64)])
        return max(0, int(changes[abs(changes) <= small].cumsum().max()))


def _extended(shorter: _Log, longer: _Log, more: int, small: int) -> int:
    """Returns the bytes that a rank needs with more layers than those of two logs.

    Args:
        shorter: The log with the fewest layers.
        longer: The log with one layer more in each stage.
        more: How many layers each stage has besides those of the longer log.
        small: Storages of at most so many bytes are not compared during the step. The result
            contains the most bytes that they have together.

    Raises:
        NotRepeatableError: It does not follow from these logs.
    """
    if shorter.names != longer.names:
        raise NotRepeatableError("the phases of the step depend on the number of layers")
    known: dict[tuple[bytes, bytes], list[_Part]] = {}
    total = peak = bound = 0
    together = longer.together(small)
    together += more * max(0, together - shorter.together(small))
    for one, other in zip(shorter.without(small), longer.without(small)):
        key = one.tobytes(), other.tobytes()
        if key not in known:
            known[key] = _parts(one, other)
        most, less, least = 0, total, 0
        for part in known[key]:
            less, least = part.after(less, least, more, BUCKET_BYTES)
            total, most = part.after(total, most, more)
        # What grows above the size of a bucket is several ones, perhaps one after the other. So the
        # peak lies between these two.
        peak, bound = max(peak, least), max(bound, most)
    if max(0, bound - peak) + together > _NOTICEABLE * peak:
        raise NotRepeatableError("buckets of small tensors take much memory")
    peak = max(peak, bound)
    return peak + together + longer.saved + more * (longer.saved - shorter.saved)


@dataclass(frozen=True)
class _Part:
    """A part of a phase.

    Attributes:
        changes: How its bytes change.
        repeated: Whether each further layer repeats it.
        grows: The places of changes that grow with the layers, and by how much.
    """

    changes: Changes
    repeated: bool = False
    grows: dict[int, int] = field(default_factory=dict)

    def after(
        self, total: int, peak: int, more: int, largest: int | None = None
    ) -> tuple[int, int]:
        """Returns the bytes after this part, and the most of them until then.

        Args:
            total: The bytes before it.
            peak: The most bytes until then.
            more: How many further layers or cycles there are.
            largest: The size to which single storages may grow; None for any.
        """
        changes, times = self.changes, more if self.repeated else 1
        if self.grows:
            changes = changes.copy()
            places, grown = [*self.grows], np.array(self.grown(more))
            if largest is not None:  # what is larger already holds a large table, and does not grow
                grown = np.minimum(grown, np.maximum(changes[places], largest))
            changes[places] = grown
        if not len(changes) or not times:
            return total, peak
        curve = changes.cumsum()
        each, most = int(curve[-1]), int(curve.max())
        highest = total + max(0, (times - 1) * each) + most  # that of the first or the last layer
        return total + times * each, max(peak, highest)

    def grown(self, more: int) -> list[int]:
        """Returns the changes that grow, with so many further layers."""
        return [int(self.changes[place]) + more * by for place, by in self.grows.items()]


def _parts(shorter: Changes, longer: Changes) -> list[_Part]:
    """Divides a phase into parts that each further layer repeats and parts that it does not.

    Args:
        shorter: The changes of the phase.
        longer: Those with a layer more.

    Returns:
        The parts of the longer one, and after each insertion what repeats it.

    Raises:
        NotRepeatableError: The longer one is not the shorter one with insertions.
    """
    found: list[_Part] = []
    grows: dict[int, int] = {}
    begin = 0
    for at, inserted in _insertions(shorter, longer):
        if inserted:
            end = at + inserted
            found.append(_Part(longer[begin:end], False, grows))
            found.append(_Part(longer[at:end], True))
            begin, grows = end, {}
        else:
            behind = sum(len(part.changes) for part in found if part.repeated)
            grows[at - begin] = int(longer[at] - shorter[at - behind])
    found.append(_Part(longer[begin:], False, grows))
    return found


def _insertions(shorter: Changes, longer: Changes) -> list[tuple[int, int]]:
    """Finds where a longer phase has more than the shorter one.

    Returns:
        Places in the longer one, in order, and how many changes are inserted there; 0 if a single
        change has another size.

    Raises:
        NotRepeatableError: There is no such list of places.
    """
    found = _search(shorter, longer, 0, 0, _MOST_INSERTED)
    if found is None:
        raise NotRepeatableError("more layers do not repeat what the last one did")
    return found


def _search(
    shorter: Changes, longer: Changes, i: int, j: int, depth: int
) -> list[tuple[int, int]] | None:
    """Compares from the places i and j on; see `_insertions`."""
    same = min(len(shorter) - i, len(longer) - j)
    differ = np.flatnonzero(shorter[i : i + same] != longer[j : j + same])
    step = int(differ[0]) if len(differ) else same
    i, j = i + step, j + step
    excess = (len(longer) - j) - (len(shorter) - i)
    if i == len(shorter) and not excess:
        return []
    if depth == 0 or excess < 0:
        return None
    for n in range(min(excess, j), 0, -1):
        if longer[j - 1] != longer[j + n - 1] or longer[j - n] != longer[j]:
            continue
        if np.array_equal(longer[j - n : j], longer[j : j + n]):
            rest = _search(shorter, longer, i, j + n, depth - 1)
            if rest is not None:
                return [(j, n), *rest]
    if i < len(shorter) and j < len(longer) and np.sign(shorter[i]) == np.sign(longer[j]):
        rest = _search(shorter, longer, i + 1, j + 1, depth - 1)
        if rest is not None:
            return [(j, 0), *rest]
    return None
