"""Packs documents into samples of a fixed number of places.

It is best-fit decreasing on a histogram of lengths (Krell et al. 2021): from the longest documents
to the shortest, each goes into the sample with the least room in which it fits. Documents of the
same length are placed together, so the time grows with the number of different lengths, and only
sorting and copying grow with the number of documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# How often each length occurs in a sample, as (length, number of times).
_Filling = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Packed:
    """The pieces of all samples: documents, or parts of those that are longer than a sample.

    A document of n tokens takes n - 1 places: each token but the last is read, and the next one is
    its target.

    Attributes:
        starts: The first token of each piece, in the order of samples [n_pieces].
        places: How many places it takes [n_pieces].
        bounds: The first piece of each sample, and the number of pieces [n_samples + 1].
    """

    starts: NDArray[np.int64]
    places: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @property
    def n_samples(self) -> int:
        return len(self.bounds) - 1


def pack(offsets: NDArray[np.int64], seq_len: int) -> Packed:
    """Packs the documents of a split. The result depends on nothing else.

    Args:
        offsets: The starts of documents, and the end of the last, [n_documents + 1].
        seq_len: Places per sample.
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
    taken = counts.cumsum() - counts  # by length, the first unused piece
    order, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for filling, n in _fillings(counts, seq_len):
        columns = []
        for length, times in filling:
            first = int(taken[length])
            taken[length] += n * times
            columns.append(by_length[first : first + n * times].reshape(n, times))
        rows = np.concatenate(columns, 1)
        order.append(rows.ravel())
        sizes.append(np.full(n, rows.shape[1]))
    placed = np.concatenate(order)
    bounds = np.concatenate([[0], np.concatenate(sizes).cumsum()])
    return Packed(starts[placed], places[placed], bounds)


def _fillings(counts: NDArray[np.int64], seq_len: int) -> list[tuple[_Filling, int]]:
    """Returns how samples are filled, and how many samples each filling has.

    Args:
        counts: How many pieces have each length, from 0 on.
        seq_len: Places per sample.
    """
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
                room, filling, available = seq_len, (), n
            times = min(room // length, n)
            used = min(available, n // times)
            add(room - times * length, (*filling, (length, times)), used)
            if filling:
                add(room, filling, available - used)
            n -= used * times
    return [each for room in rooms for each in samples[room]]
