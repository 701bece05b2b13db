"""Windows of running text, whose next tokens are the targets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.samples import Arrays
from gridformer.data.tokenfolder import TokenSplit
from gridformer.utils.errors import DataError


class WindowSamples:
    """Divides a split into windows of seq_len tokens. They have no random choices.

    Sample i is tokens [i*seq_len, (i+1)*seq_len], one more than seq_len, so that inputs and targets
    are the same window shifted by one; neighboring samples share that one token. `n_samples` counts
    the windows whose last target exists.

    Args:
        split: The split.
        seq_len: Tokens per sample.

    Raises:
        DataError: The split is too short for a single sample.
        ValueError: `seq_len` is less than 1.
    """

    n_left_out = 0

    def __init__(self, split: TokenSplit, seq_len: int) -> None:
        if seq_len < 1:
            raise ValueError(f"{seq_len=} must be at least 1")
        self.split, self.seq_len = split, seq_len
        self.n_samples = max(0, split.n_tokens - 1) // seq_len
        if self.n_samples == 0:
            raise DataError(_too_short(split, seq_len))

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns tokens and targets [seq_len]."""
        return {key: value[0] for key, value in self.together(np.array([number])).items()}

    def together(self, numbers: NDArray[np.int64]) -> Arrays:
        """Returns tokens and targets [len(numbers), seq_len] of several samples.

        It reads only these from the disk.

        Raises:
            DataError: An id is outside the vocabulary, which happens only in a damaged file.
        """
        ids = self.split.windows(numbers * self.seq_len, self.seq_len + 1)
        tokens, targets = ids[:, :-1], ids[:, 1:]
        return {"tokens": np.ascontiguousarray(tokens), "targets": np.ascontiguousarray(targets)}


def _too_short(split: TokenSplit, seq_len: int) -> str:
    more = "more text" if split.name == "train" else "more text or a larger --val-fraction"
    shorter = f"use data.seq_len of at most {split.n_tokens - 1}, or " if split.n_tokens > 1 else ""
    return (
        f"{split.path}: {split.n_tokens} tokens hold no sample of data.seq_len={seq_len}, which "
        f"takes {seq_len + 1}: {shorter}prepare {more}"
    )
