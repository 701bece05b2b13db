"""From samples to batches: what a kind of sample must offer, and how its rows are put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.order import Order
from gridformer.data.tokenfolder import TokenSplit

Arrays = dict[str, NDArray[Any]]


class Samples(Protocol):
    """All samples of one split for one task."""

    @property
    def n_samples(self) -> int: ...

    @property
    def n_left_out(self) -> int:
        """How many the split holds besides, that do not fit the lengths of the run."""

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """One sample, keys as in `gridformer.utils.batch` without their b; all have the same
        shapes."""


class Batches(Protocol):
    """The global batches of a run, a step after the other without end."""

    @property
    def n_samples(self) -> int: ...

    @property
    def n_left_out(self) -> int: ...

    def batch(self, step: int, rows: slice | None = None) -> Arrays:
        """Some rows (None: all) of the global batch of a step, with the keys of
        `gridformer.utils.batch`.

        int64 and bool arrays. A function of (seed, step, row) alone: rows read apart are those of
        the whole, on every layout and after any resume. Raises DataError at a damaged file.
        """


@dataclass(frozen=True)
class Dealt:
    """Batches of samples in the order of `Order`; `purpose` keeps random numbers of two uses apart.

    What is random in a sample is drawn anew in each epoch.
    """

    samples: Samples
    order: Order
    purpose: str

    @property
    def n_samples(self) -> int:
        return self.samples.n_samples

    @property
    def n_left_out(self) -> int:
        return self.samples.n_left_out

    def batch(self, step: int, rows: slice | None = None) -> Arrays:
        """See Batches."""
        numbers = self.order.indices(step)
        wanted = range(len(numbers))[rows if rows is not None else slice(None)]
        # No rows still have keys and shapes: those of the first.
        read = [self._sample(step, row, int(numbers[row])) for row in wanted or range(1)]
        return {key: np.stack([one[key] for one in read])[: len(wanted)] for key in read[0]}

    def _sample(self, step: int, row: int, number: int) -> Arrays:
        return self.samples.sample(number, self.order.generator(step, row, self.purpose))


def padded(ids: NDArray[np.int64], length: int, value: int) -> NDArray[np.int64]:
    """ids [n] with `value` appended to [length]; n <= length."""
    out = np.full(length, value, dtype=np.int64)
    out[: len(ids)] = ids
    return out


def first(n: int, length: int) -> NDArray[np.bool_]:
    """[length] bool: the first n are real."""
    return np.arange(length) < n


def more_text(split: TokenSplit) -> str:
    """`prepare more text`: the end of a sentence about a split that is too short."""
    larger = "" if split.name == "train" else " or a larger --val-fraction"
    return f"prepare more text{larger}"
