"""The order of samples: the source and the sample of each row of each step.

It is a function of (seed, step, row) alone, so every layout and every resumed run reads the same
samples in the same order, and draws the same random numbers for them.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

# Rows of a global batch: a slice of them, or their numbers in any order.
Rows = slice | NDArray[np.int64]
_ROUNDS = 8  # four are enough to shuffle a large n well; tiny domains need some more


@dataclass(frozen=True)
class Stage:
    """Weights that hold from a step on."""

    first_step: int  # counted from 0
    weights: tuple[int, ...]  # whole numbers of the sources, without a common divisor


@dataclass(frozen=True)
class Cycle:
    """The order of sources, which repeats after `length` samples; every prefix has their shares.

    With weights w_i that add up to 1, the first n samples contain more than n*w_i - 1 and fewer
    than n*w_i + 1 of source i, for every n. Sample j of source i (counted from 0) may therefore be
    neither before slot floor(j / w_i) nor after slot ceil((j + 1) / w_i) - 1. Taking the source
    whose next sample is due first, of those that may come, keeps all these deadlines: it is the
    schedule of periodic tasks that Baruah, Cohen, Plaxton and Varvel (1996, "Proportionate
    progress: a notion of fairness in resource allocation") call P-fair. With whole weights the
    order repeats after their sum, so one table of that length says everything about a run of any
    length.
    """

    sources: NDArray[np.int64]  # of each slot of the cycle [length]
    ranks: NDArray[np.int64]  # how many earlier slots of the cycle have the same source [length]
    counts: tuple[int, ...]  # the slots of each source, which are the whole weights

    @property
    def length(self) -> int:
        return len(self.sources)

    def before(self, slot: int) -> list[int]:
        """Returns how many of the slots before `slot`, in any cycle, each source has."""
        cycles, rest = divmod(slot, self.length)
        begun = np.bincount(self.sources[:rest], minlength=len(self.counts)).tolist()
        return [cycles * count + more for count, more in zip(self.counts, begun)]


@lru_cache(maxsize=64)
def cycle_of(weights: tuple[int, ...]) -> Cycle:
    """Returns the cycle of whole weights >= 0 without a common divisor."""
    length = sum(weights)
    # One entry per source: the first slot of its next sample, or the slot before which it is due.
    waiting = [(0, i, 0) for i, weight in enumerate(weights) if weight]
    due: list[tuple[int, int, int]] = []
    sources = np.empty(length, dtype=np.int64)
    for slot in range(length):
        while waiting and waiting[0][0] <= slot:
            _, i, number = heapq.heappop(waiting)
            heapq.heappush(due, (-(-(number + 1) * length // weights[i]), i, number))
        _, i, number = heapq.heappop(due)
        sources[slot] = i
        heapq.heappush(waiting, ((number + 1) * length // weights[i], i, number + 1))
    ranks = np.empty(length, dtype=np.int64)
    for i, weight in enumerate(weights):
        ranks[sources == i] = np.arange(weight)
    return Cycle(sources, ranks, weights)


@dataclass(frozen=True)
class Order:
    """Assigns the samples of one or several sources to global batches.

    Each source goes through epochs of its own, without a gap and across stages: it visits every
    sample once before it visits one again. `Cycle` says which source comes when; it begins anew
    with every stage. A batch may span two epochs.
    """

    # Shuffles are drawn from the seed and the source's name, so that a source that is added does
    # not change the order of the others. A single source may have the empty name.
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    stages: tuple[Stage, ...]  # in ascending order; the first one begins with step 0
    global_batch: int
    seed: int

    @classmethod
    def of_one(cls, n_samples: int, global_batch: int, seed: int) -> Order:
        """Returns the order of the samples of a single source."""
        return cls(("",), (n_samples,), (Stage(0, (1,)),), global_batch, seed)

    def places(
        self, step: int, rows: Rows | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the sources and the sample numbers in them, each [rows] int64, of a step."""
        if step < 0:
            raise ValueError(f"{step=} must not be negative")
        number = max(n for n, stage in enumerate(self.stages) if stage.first_step <= step)
        stage = self.stages[number]
        cycle = cycle_of(stage.weights)
        wanted = row_numbers(self.global_batch, rows)
        # Slots of a stage are counted with Python's integers; those within a cycle are small.
        cycles, start = divmod((step - stage.first_step) * self.global_batch, cycle.length)
        ahead, slots = np.divmod(start + wanted, cycle.length)
        sources = cycle.sources[slots]
        numbers = np.empty_like(sources)
        for i in np.unique(sources).tolist():
            here = sources == i
            first = self._read_before[number][i] + cycles * cycle.counts[i]
            later = ahead[here] * cycle.counts[i] + cycle.ranks[slots[here]]
            seed = f"{self.seed}/{self.names[i]}" if self.names[i] else str(self.seed)
            numbers[here] = in_epochs(first, later, self.sizes[i], seed)
        return sources, numbers

    @cached_property
    def _read_before(self) -> list[list[int]]:
        """For each stage, how many samples of each source are read before it."""
        read = [[0] * len(self.names)]
        for stage, after in zip(self.stages, self.stages[1:]):
            slots = (after.first_step - stage.first_step) * self.global_batch
            new = cycle_of(stage.weights).before(slots)
            read.append([one + more for one, more in zip(read[-1], new)])
        return read


def in_epochs(first: int, ahead: NDArray[np.int64], n: int, seed: int | str) -> NDArray[np.int64]:
    """Returns the samples at places `first + ahead` [k] of an endless sequence of epochs."""
    # The place is a Python integer: it could in theory exceed 2^63, but the position within an
    # epoch cannot.
    epoch, start = divmod(first, n)
    epochs, positions = np.divmod(start + ahead, n)
    for later in np.unique(epochs).tolist():
        here = epochs == later
        positions[here] = permute(positions[here], n, seed, epoch + later)
    return positions


def generator_of(seed: int, purpose: str, place: int) -> np.random.Generator:
    """Returns the random numbers for one purpose at one place of the global order of samples."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{place}".encode(), digest_size=16)
    # The streams of a counter-based generator do not overlap for different keys.
    key = int.from_bytes(digest.digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def row_numbers(global_batch: int, rows: Rows | None) -> NDArray[np.int64]:
    """Returns the numbers of `rows` in a global batch, [rows] int64; None means all."""
    every = np.arange(global_batch, dtype=np.int64)
    return every if rows is None else every[rows]


def permute(positions: NDArray[np.int64], n: int, seed: int | str, epoch: int) -> NDArray[np.int64]:
    """Applies the shuffle of [0, n) for (seed, epoch) to each position, without a table.

    A Feistel network over Z_a x Z_b with a*b just above n (Black and Rogaway 2002, "Ciphers with
    arbitrary finite domains", method 3). Every round adds a hash of one half to the other half,
    which is invertible for any hash, so the network is a bijection. Results in [n, a*b) go through
    the network again until they are below n. It uses only integers, so the order is the same
    everywhere, and besides argument and result it takes O(1) memory.
    """
    assert n >= 1
    assert positions.size == 0 or (positions.min() >= 0 and positions.max() < n)
    keys = _keys(seed, epoch)
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    out = _rounds(positions.astype(np.uint64), a, b, keys)
    # a*b < n + a, so few positions repeat, and each ends, because its cycle began below n.
    while (outside := out >= np.uint64(n)).any():
        out[outside] = _rounds(out[outside], a, b, keys)
    return out.astype(np.int64)


def _rounds(x: NDArray[np.uint64], a: int, b: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    size_a, size_b = np.uint64(a), np.uint64(b)
    left, right = x // size_b, x % size_b
    for i, key in enumerate(keys):
        if i % 2 == 0:
            left = (left + _hash(right, key) % size_a) % size_a
        else:
            right = (right + _hash(left, key) % size_b) % size_b
    return left * size_b + right


def _hash(x: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014); products wrap modulo 2^64."""
    x = x + np.uint64(0x9E3779B97F4A7C15) ^ key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _keys(seed: int | str, epoch: int) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
