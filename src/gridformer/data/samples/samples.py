"""Samples and batches: their protocols, and batches that are assembled from samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.mixture import Mixture
from gridformer.data.samples.order import Order, Rows, generator_of, row_numbers
from gridformer.data.tokenfolder import TokenSplit
from gridformer.utils.batch import IGNORE

Arrays = dict[str, NDArray[Any]]
_WANTED = ("labels", "answer", "targets")


class Samples(Protocol):
    """All samples of one split for one task.

    Attributes:
        n_samples: How many samples there are.
    """

    @property
    def n_samples(self) -> int: ...

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
    """

    @property
    def n_samples(self) -> int: ...

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
class ShuffledBatches:
    """Batches of samples in a given order. Each epoch draws the random choices of a sample anew.

    Attributes:
        samples: The samples of each source, of one shape and with the same keys.
        order: Their order.
        purpose: A name that makes random numbers differ from those of other uses.
        start: The step at which the order begins.
    """

    samples: tuple[Samples, ...]
    order: Order | Mixture
    purpose: str
    start: int = 0

    @property
    def n_samples(self) -> int:
        return sum(one.n_samples for one in self.samples)

    def batch(self, step: int, rows: Rows | None = None) -> Arrays:
        """See Batches."""
        step -= self.start
        wanted, made = _made(self.order.global_batch, rows)
        sources, numbers = self.order.places(step, made)
        out: Arrays = {}
        for source in np.unique(sources).tolist():
            here = np.flatnonzero(sources == source)

            def draw(place: int, made: NDArray[np.int64] = made[here]) -> np.random.Generator:
                number = step * self.order.global_batch + int(made[place])
                return generator_of(self.order.seed, self.purpose, number)

            read = _read(self.samples[source], numbers[here], draw)
            if len(here) == len(made):
                out = read
                break
            for key, value in read.items():
                if key not in out:
                    out[key] = np.empty((len(made), *value.shape[1:]), value.dtype)
                out[key][here] = value
        return {key: value[: len(wanted)] for key, value in out.items()}


@dataclass(frozen=True)
class SequentialBatches:
    """Batches that hold every sample of a set once, in order: what an exact evaluation reads.

    Batch i holds the samples from i * global_batch on, with their numbers as key `item` [b]. Rows
    after the last sample repeat the first one. Their number is n_samples, and nothing is predicted
    for them, so that they count in no loss.

    Attributes:
        samples: The samples, which must not depend on random choices.
        global_batch: Samples per batch.
    """

    samples: Samples
    global_batch: int

    @property
    def n_samples(self) -> int:
        return self.samples.n_samples

    @property
    def numbers(self) -> range:
        """The numbers of the batches."""
        return range(-(-self.n_samples // self.global_batch))

    def batch(self, step: int, rows: Rows | None = None) -> Arrays:
        """See Batches."""
        wanted, made = _made(self.global_batch, rows)
        items = np.minimum(step * self.global_batch + made, self.n_samples)
        read = [self._sample(int(item)) for item in items]
        return {key: np.stack([one[key] for one in read])[: len(wanted)] for key in read[0]}

    def _sample(self, item: int) -> Arrays:
        filler = item == self.n_samples
        found = self.samples.sample(0 if filler else item, np.random.default_rng(0))
        if filler:
            found |= {k: _nothing(found[k]) for k in _WANTED if k in found}
        return found | {"item": np.array(item, dtype=np.int64)}


def _nothing(wanted: NDArray[Any]) -> NDArray[Any]:
    """Returns targets of the same shape that do not count."""
    return np.full_like(wanted, np.nan if wanted.dtype.kind == "f" else IGNORE)


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
