"""Windows of running text in global batches, of which each process reads its rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.order import Order, Rows
from gridformer.data.tokenfolder import TokenSplit
from gridformer.utils.errors import DataError


class BatchSampler:
    """Divides a split into windows of seq_len tokens and assigns them to global batches.

    Sample i is tokens [i*seq_len, (i+1)*seq_len], one more than seq_len, so that inputs and targets
    are the same window shifted by one; neighboring samples share that one token. `n_samples` counts
    the windows whose last target exists. `Order` determines their order.

    Args:
        split: The split.
        seq_len: Tokens per sample.
        global_batch: Samples per step.
        seed: The seed of the order.
        sequential: Whether samples come in ascending order.

    Raises:
        DataError: The split is too short for a single sample.
        ValueError: `seq_len` or `global_batch` is less than 1.
    """

    def __init__(
        self,
        split: TokenSplit,
        seq_len: int,
        global_batch: int,
        seed: int = 0,
        *,
        sequential: bool = False,
    ) -> None:
        if seq_len < 1 or global_batch < 1:
            raise ValueError(f"{seq_len=} and {global_batch=} must be at least 1")
        self.split = split
        self.seq_len = seq_len
        self.global_batch = global_batch
        self.n_samples = max(0, split.n_tokens - 1) // seq_len
        if self.n_samples == 0:
            raise DataError(_too_short(split, seq_len))
        self.order = Order(self.n_samples, global_batch, seed, sequential)

    def indices(self, step: int, rows: Rows | None = None) -> NDArray[np.int64]:
        """Returns the sample numbers [rows] of a step >= 0; see `Order.indices`."""
        return self.order.indices(step, rows)

    def batch(self, step: int, rows: Rows | None = None) -> NDArray[np.int64]:
        """Returns token ids [rows, seq_len + 1] int64 of a step's global batch.

        It reads only these rows from the disk.

        Args:
            step: The number of the step, counted from 0.
            rows: The rows; None returns all.

        Raises:
            DataError: An id is outside the vocabulary, which happens only in a damaged file.
        """
        starts = self.indices(step, rows) * self.seq_len
        return self.split.windows(starts, self.seq_len + 1)


def _too_short(split: TokenSplit, seq_len: int) -> str:
    more = "more text" if split.name == "train" else "more text or a larger --val-fraction"
    shorter = f"use data.seq_len of at most {split.n_tokens - 1}, or " if split.n_tokens > 1 else ""
    return (
        f"{split.path}: {split.n_tokens} tokens hold no sample of data.seq_len={seq_len}, which "
        f"takes {seq_len + 1}: {shorter}prepare {more}"
    )
