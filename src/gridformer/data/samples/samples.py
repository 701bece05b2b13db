"""Samples and batches: their protocols, and batches that are assembled from samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.mixture import Mixture
from gridformer.data.samples.order import Order, Rows, row_numbers
from gridformer.data.tokenfolder import TokenSplit

Arrays = dict[str, NDArray[Any]]


class Samples(Protocol):
    """All samples of one split for one task.

    Attributes:
        n_samples: How many samples there are.
    """

    @property
    def n_samples(self) -> int: ...

    @property
    def n_left_out(self) -> int:
        """How many more samples the split has that do not fit the lengths of the run."""

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns one sample: the keys of `gridformer.utils.batch` without dimension b.

        All samples have the same shapes.

        Args:
            number: The number of the sample, in [0, n_samples).
            draw: The source of the sample's random choices.
        """


@runtime_checkable
class ReadTogether(Protocol):
    """Samples without random choices that are read faster together than one by one."""

    def together(self, numbers: NDArray[np.int64]) -> Arrays:
        """Returns several samples, with the keys of `sample` and dimension b first."""


class Batches(Protocol):
    """The global batches of a run, one for every step without end.

    Attributes:
        n_samples: How many samples an epoch has.
        n_left_out: How many more samples do not fit the lengths of the run.
    """

    @property
    def n_samples(self) -> int: ...

    @property
    def n_left_out(self) -> int: ...

    def batch(self, step: int, rows: Rows | None = None) -> Arrays:
        """Returns rows of the global batch of a step, with the keys of `gridformer.utils.batch`.

        Each row is a function of (seed, step, row) alone, so it is the same whichever other rows
        are read with it, under every layout, and after every resume.

        Args:
            step: The number of the step, counted from 0.
            rows: The rows; None returns all.

        Returns:
            int64 and bool arrays by key.

        Raises:
            DataError: A file is damaged.
        """


@dataclass(frozen=True)
class Dealt:
    """Batches of samples in a given order. Each epoch draws the random choices of a sample anew.

    Attributes:
        samples: The samples.
        order: Their order.
        purpose: A name that makes random numbers differ from those of other uses.
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

    def batch(self, step: int, rows: Rows | None = None) -> Arrays:
        """See Batches."""
        wanted, made = _made(self.order.global_batch, rows)
        numbers = self.order.indices(step, made)

        def draw(place: int) -> np.random.Generator:
            return self.order.generator(step, int(made[place]), self.purpose)

        read = _read(self.samples, numbers, draw)
        return {key: value[: len(wanted)] for key, value in read.items()}


@dataclass(frozen=True)
class Mixed:
    """Batches of the samples of several sources.

    Attributes:
        samples: The samples of each source, of one shape and with the same keys.
        order: Their order.
        purpose: See Dealt.
    """

    samples: tuple[Samples, ...]
    order: Mixture
    purpose: str

    @property
    def n_samples(self) -> int:
        return sum(one.n_samples for one in self.samples)

    @property
    def n_left_out(self) -> int:
        return sum(one.n_left_out for one in self.samples)

    def batch(self, step: int, rows: Rows | None = None) -> Arrays:
        """See Batches."""
        wanted, made = _made(self.order.global_batch, rows)
        sources, numbers = self.order.places(step, made)
        out: Arrays = {}
        for source in np.unique(sources).tolist():
            here = np.flatnonzero(sources == source)

            def draw(place: int, made: NDArray[np.int64] = made[here]) -> np.random.Generator:
                return self.order.generator(step, int(made[place]), self.purpose)

            for key, value in _read(self.samples[source], numbers[here], draw).items():
                if key not in out:
                    out[key] = np.empty((len(made), *value.shape[1:]), value.dtype)
                out[key][here] = value
        return {key: value[: len(wanted)] for key, value in out.items()}


def _made(global_batch: int, rows: Rows | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the numbers of the rows, and of those to make.

    An empty batch takes its keys and shapes from the first row.
    """
    wanted = row_numbers(global_batch, rows)
    return wanted, wanted if len(wanted) else np.zeros(1, dtype=np.int64)


def _read(
    samples: Samples, numbers: NDArray[np.int64], draw: Callable[[int], np.random.Generator]
) -> Arrays:
    """Returns samples with dimension b first.

    Args:
        samples: The samples of one source.
        numbers: Their numbers, [b] int64.
        draw: Returns the random numbers of a place in `numbers`.
    """
    if isinstance(samples, ReadTogether):
        return samples.together(numbers)
    read = [samples.sample(number, draw(place)) for place, number in enumerate(numbers.tolist())]
    return {key: np.stack([one[key] for one in read]) for key in read[0]}


@dataclass(frozen=True)
class Restarted:
    """Batches whose order begins at a later step.

    Attributes:
        batches: The batches, whose first one is that of step `start`.
        start: That step.
    """

    batches: Batches
    start: int

    @property
    def n_samples(self) -> int:
        return self.batches.n_samples

    @property
    def n_left_out(self) -> int:
        return self.batches.n_left_out

    def batch(self, step: int, rows: Rows | None = None) -> Arrays:
        """See Batches."""
        return self.batches.batch(step - self.start, rows)


def padded(ids: NDArray[np.int64], length: int, value: int) -> NDArray[np.int64]:
    """Pads ids [n] with `value` to [length]; n <= length."""
    out = np.full(length, value, dtype=np.int64)
    out[: len(ids)] = ids
    return out


def first(n: int, length: int) -> NDArray[np.bool_]:
    """Returns a mask [length] whose first n elements are true."""
    return np.arange(length) < n


def more_text(split: TokenSplit) -> str:
    """Returns the remedy for a split that is too short, as the end of a sentence."""
    larger = "" if split.name == "train" else " or a larger --val-fraction"
    return f"prepare more text{larger}"
