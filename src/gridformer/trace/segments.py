"""A step with many layers, from the records of two steps with few.

The longer of the two has a layer more of each kind. Its record must be that of the shorter one
with something inserted, and what is inserted must be what stands before it, because the layer
before did the same. Each further layer then inserts it once more. The size of a single event may
differ as well, such as that of a list of norms; it grows along a line.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_MOST_INSERTED = 24  # places of a phase, such as loops over parameters

Ids = NDArray[np.int64]


class NotPeriodicError(Exception):
    """A step with one layer more does not repeat what the last layer did."""


class LayerSegment(NamedTuple):
    """Events of the longer record that stand together.

    Attributes:
        begin: The first of them.
        end: The first behind them.
        repeated: Whether they stand for one more layer, so that each further layer has them, too.
        grows: Events whose size grows with each layer, each with its place in the shorter record.
    """

    begin: int
    end: int
    repeated: bool
    grows: tuple[tuple[int, int], ...] = ()


def segments(shorter: Ids, longer: Ids, sizeless: tuple[Ids, Ids]) -> list[LayerSegment]:
    """Divides a record into segments that each further layer repeats and others.

    Args:
        shorter: The numbers of the events with fewer layers, which are equal for equal events.
        longer: Those with a layer more.
        sizeless: The same of both where the sizes of events do not count.

    Returns:
        The segments of the longer one, in order. A repeated one comes after its first appearance.

    Raises:
        NotPeriodicError: The longer one is not the shorter one with insertions.
    """
    found: list[LayerSegment] = []
    grows: list[tuple[int, int]] = []
    begin = behind = 0
    places = _search(shorter, longer, sizeless, 0, 0, _MOST_INSERTED)
    if places is None:
        raise NotPeriodicError("a step with more layers does not repeat what the last one did")
    for at, inserted in places:
        if inserted:
            end = at + inserted
            found += [LayerSegment(begin, end, False, tuple(grows)), LayerSegment(at, end, True)]
            begin, behind, grows = end, behind + inserted, []
        else:
            grows.append((at, at - behind))
    found.append(LayerSegment(begin, len(longer), False, tuple(grows)))
    return found


def _search(
    shorter: Ids, longer: Ids, sizeless: tuple[Ids, Ids], i: int, j: int, depth: int
) -> list[tuple[int, int]] | None:
    """Compares from the places i and j on.

    Returns:
        Places in the longer record, in order, and how many events are inserted there; 0 where a
        single event has another size. None if there is no such list.
    """
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
            rest = _search(shorter, longer, sizeless, i, j + n, depth - 1)
            if rest is not None:
                return [(j, n), *rest]
    if i < len(shorter) and j < len(longer) and sizeless[0][i] == sizeless[1][j]:
        rest = _search(shorter, longer, sizeless, i + 1, j + 1, depth - 1)
        if rest is not None:
            return [(j, 0), *rest]
    return None
