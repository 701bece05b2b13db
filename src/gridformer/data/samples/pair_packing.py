"""Packs pairs of texts into rows with room for sources and room for targets.

Each row begins with the longest pair that is left. Then comes, again and again, the pair that fits
and has the largest dot product with the room that is left, so that a pair with a long target goes
where much room for targets is left (Panigrahy, Talwar, Uyeda and Wieder 2011, "Heuristics for
vector bin packing"). Pairs of the same two lengths are one kind. The filling of a row is repeated
until one of its kinds is used up, so the time grows with the number of kinds, and only sorting
grows with the number of pairs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MOST_KINDS = 1 << 14


def pack_pairs(
    lengths: NDArray[np.int64], room: tuple[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Packs pairs into rows. The result depends on nothing else.

    Args:
        lengths: Tokens of source and target of each pair [n, 2], at least 1 and at most `room`.
        room: Places of a row for sources and for targets.

    Returns:
        The numbers of the pairs in the order of rows [n], and the place in it of the first pair of
        each row, and n, [rows + 1].
    """
    sizes, rooms = _in_units(lengths, room)
    kinds = sizes[:, 0] * (rooms[1] + 1) + sizes[:, 1]
    by_kind = np.argsort(kinds, kind="stable")
    found, counts = np.unique(kinds, return_counts=True)
    of_kinds = np.stack(np.divmod(found, rooms[1] + 1), 1)
    taken = counts.cumsum() - counts  # by kind, the first unused pair
    order, per_row = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for filling, n in _fillings(of_kinds, counts, rooms):
        columns = []
        for kind, times in filling.items():
            first = int(taken[kind])
            taken[kind] += n * times
            columns.append(by_kind[first : first + n * times].reshape(n, times))
        rows = np.concatenate(columns, 1)
        order.append(rows.ravel())
        per_row.append(np.full(n, rows.shape[1]))
    bounds = np.concatenate([[0], np.concatenate(per_row).cumsum()])
    return np.concatenate(order), bounds


def _in_units(
    lengths: NDArray[np.int64], room: tuple[int, int]
) -> tuple[NDArray[np.int64], tuple[int, int]]:
    """Returns lengths and rooms in units of several tokens, so large that there are few kinds.

    Lengths are rounded up, so that what fits in units fits in tokens. There are many kinds only
    where texts are long, and rounding then wastes little of a row.
    """
    unit = 1
    while True:
        rooms = room[0] // unit, room[1] // unit
        # A text that fits only because its row is no multiple of the unit fills the row.
        sizes = np.minimum(-(-lengths // unit), rooms)
        if len(np.unique(sizes[:, 0] * (rooms[1] + 1) + sizes[:, 1])) <= _MOST_KINDS:
            return sizes, rooms
        unit *= 2


def _fillings(
    kinds: NDArray[np.int64], counts: NDArray[np.int64], rooms: tuple[int, int]
) -> list[tuple[dict[int, int], int]]:
    """Returns the fillings of rows: how often each kind is in a row, and the number of such rows.

    Args:
        kinds: The two sizes of each kind [kinds, 2].
        counts: How many pairs are of each kind.
        rooms: The two sizes of a row.
    """
    shares = kinds / rooms
    order = np.argsort(-shares.sum(1), kind="stable")
    # Separate columns, because nearly all time goes into a few operations on every kind.
    (a, b), (share_a, share_b), left = kinds[order].T.copy(), shares[order].T.copy(), counts[order]
    found: list[tuple[dict[int, int], int]] = []
    while len(left):
        filling: dict[int, int] = {}
        (room_a, room_b), kind = rooms, 0
        while True:
            filling[kind] = filling.get(kind, 0) + 1
            room_a, room_b = room_a - int(a[kind]), room_b - int(b[kind])
            fits = (a <= room_a) & (b <= room_b)
            for used, times in filling.items():
                fits[used] &= times < left[used]
            products = share_a * (room_a / rooms[0]) + share_b * (room_b / rooms[1])
            kind = int((products * fits).argmax())
            if not fits[kind]:
                break
        n = min(int(left[used]) // times for used, times in filling.items())
        found.append(({int(order[used]): times for used, times in filling.items()}, n))
        for used, times in filling.items():
            left[used] -= n * times
        some = left > 0
        if not some.all():
            a, b, share_a, share_b = a[some], b[some], share_a[some], share_b[some]
            left, order = left[some], order[some]
    return found
