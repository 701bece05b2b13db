"""Batches that hold every sample of a set once, in order: what an exact evaluation reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.order import Rows, row_numbers
from gridformer.data.samples.samples import Arrays, Samples
from gridformer.utils.batch import IGNORE

_WANTED = ("labels", "answer", "targets")


@dataclass(frozen=True)
class Whole:
    """Batch i holds the samples from i * global_batch on, with their numbers as key `item` [b].

    Rows after the last sample repeat the first one. Their number is n_samples, and nothing is
    predicted for them, so that they count in no loss.

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
    def n_left_out(self) -> int:
        return self.samples.n_left_out

    @property
    def numbers(self) -> range:
        """The numbers of the batches."""
        return range(-(-self.n_samples // self.global_batch))

    def batch(self, step: int, rows: Rows | None = None) -> Arrays:
        """See Batches."""
        wanted = row_numbers(self.global_batch, rows)
        made = wanted if len(wanted) else np.zeros(1, dtype=np.int64)
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
