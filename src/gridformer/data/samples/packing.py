"""Packs documents, or pairs of texts, into samples of a fixed number of places.

What has the same length, or the same two lengths, is one kind and is placed together, so the time
grows with the number of kinds, and only sorting and copying grow with the number of documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_Filling = dict[int, int]  # how often each kind is in a sample
_MOST_KINDS = 1 << 14  # of pairs


def pack(
    offsets: NDArray[np.int64], seq_len: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Packs the documents of a split. The result depends on nothing else.

    It is best-fit decreasing on a histogram of lengths (Krell et al. 2021): from the longest
    documents to the shortest, each goes into the sample with the least room in which it fits. A
    document that is longer than a sample is divided into pieces. One of n tokens takes n - 1
    places: each token but the last is read, and the next one is its target.

    Args:
        offsets: The starts of documents, and the end of the last, [n_documents + 1].

    Returns:
        The first token of each piece, in the order of samples [n_pieces]; how many places it takes
        [n_pieces]; the first piece of each sample, and n_pieces, [n_samples + 1].
    """
    left = np.maximum(np.diff(offsets) - 1, 0)
    n_pieces = -(-left // seq_len)
    owner = np.repeat(np.arange(len(left)), n_pieces)
    begin = (np.arange(len(owner)) - (n_pieces.cumsum() - n_pieces)[owner]) * seq_len
    places = np.minimum(left[owner] - begin, seq_len)
    starts = offsets[owner] + begin
    # Few bits sort faster.
    by_length = np.argsort(places.astype(np.min_scalar_type(seq_len)), kind="stable")
    counts = np.bincount(places, minlength=1)
    placed, bounds = _placed(_fillings(counts, seq_len), by_length, counts)
    return starts[placed], places[placed], bounds


def _placed(
    fillings: Iterable[tuple[_Filling, int]],
    by_kind: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns pieces in the order of samples, and the first of each sample, [samples + 1].

    Args:
        fillings: How often each kind is in a sample, and the number of such samples.
        by_kind: The numbers of all pieces, sorted by kind.
        counts: How many are of each kind.
    """
    taken = counts.cumsum() - counts  # by kind, the first unused one
    order, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for filling, n in fillings:
        columns = []
        for kind, times in filling.items():
            first = int(taken[kind])
            taken[kind] += n * times
            columns.append(by_kind[first : first + n * times].reshape(n, times))
        rows = np.concatenate(columns, 1)
        order.append(rows.ravel())
        sizes.append(np.full(n, rows.shape[1]))
    return np.concatenate(order), np.concatenate([[0], np.concatenate(sizes).cumsum()])


def _fillings(counts: NDArray[np.int64], seq_len: int) -> list[tuple[_Filling, int]]:
    """Returns how samples are filled with counts[n] pieces of each length n, and how many each."""
    samples: dict[int, list[tuple[_Filling, int]]] = {}  # by room
    rooms: list[int] = []  # the keys of `samples`, ascending

    def add(room: int, filling: _Filling, n: int) -> None:
        if n and room not in samples:
            samples[room] = []
            insort(rooms, room)
        if n:
            samples[room].append((filling, n))

    for length in np.flatnonzero(counts)[::-1].tolist():
        n = int(counts[length])
        while n:
            place = bisect_left(rooms, length)
            if place < len(rooms):
                room = rooms[place]
                filling, available = samples[room].pop()
                if not samples[room]:
                    del samples[room], rooms[place]
            else:
                room, filling, available = seq_len, {}, n
            times = min(room // length, n)
            used = min(available, n // times)
            add(room - times * length, {**filling, length: times}, used)
            if filling:
                add(room, filling, available - used)
            n -= used * times
    return [each for room in rooms for each in samples[room]]


def pack_pairs(
    lengths: NDArray[np.int64], room: tuple[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Packs pairs into rows with room for sources and for targets. The result depends on no more.

    Each row begins with the longest pair that is left. Then comes, again and again, the pair that
    fits and has the largest dot product with the room that is left, so that a pair with a long
    target goes where much room for targets is left (Panigrahy, Talwar, Uyeda and Wieder 2011,
    "Heuristics for vector bin packing"). The filling of a row is repeated until one of its kinds is
    used up.

    Args:
        lengths: Tokens of source and target of each pair [n, 2], at least 1 and at most `room`.

    Returns:
        The pairs in the order of rows [n]; the first pair of each row, and n, [rows + 1].
    """
    sizes, rooms = _in_units(lengths, room)
    kinds = sizes[:, 0] * (rooms[1] + 1) + sizes[:, 1]
    by_kind = np.argsort(kinds, kind="stable")
    each, counts = np.unique(kinds, return_counts=True)
    of_kinds = np.stack(np.divmod(each, rooms[1] + 1), 1)
    return _placed(_pair_fillings(of_kinds, counts, rooms), by_kind, counts)


def _in_units(
    lengths: NDArray[np.int64], room: tuple[int, int]
) -> tuple[NDArray[np.int64], tuple[int, int]]:
    """Returns lengths and rooms in units of several tokens, so large that there are few kinds."""
    # There are many kinds only where texts are long, and rounding up then wastes little of a row.
    unit = 1
    while True:
        rooms = room[0] // unit, room[1] // unit
        # A text that fits only because its row is no multiple of the unit fills the row.
        sizes = np.minimum(-(-lengths // unit), rooms)
        if len(np.unique(sizes[:, 0] * (rooms[1] + 1) + sizes[:, 1])) <= _MOST_KINDS:
            return sizes, rooms
        unit *= 2


def _pair_fillings(
    kinds: NDArray[np.int64], counts: NDArray[np.int64], rooms: tuple[int, int]
) -> list[tuple[_Filling, int]]:
    """Returns how rows are filled with counts[k] pairs of the sizes kinds[k], and how many each."""
    shares = kinds / rooms
    order = np.argsort(-shares.sum(1), kind="stable")
    # Separate columns, because nearly all time goes into a few operations on every kind.
    (a, b), (share_a, share_b), left = kinds[order].T.copy(), shares[order].T.copy(), counts[order]
    fillings: list[tuple[_Filling, int]] = []
    while len(left):
        filling: _Filling = {}
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
        fillings.append(({int(order[used]): times for used, times in filling.items()}, n))
        for used, times in filling.items():
            left[used] -= n * times
        some = left > 0
        if not some.all():
            a, b, share_a, share_b = a[some], b[some], share_a[some], share_b[some]
            left, order = left[some], order[some]
    return fillings
