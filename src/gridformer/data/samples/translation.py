"""Samples of translation: the model reads the first text of a pair and generates the second."""

from __future__ import annotations

import numpy as np

from gridformer.data.samples.samples import Arrays, first, padded
from gridformer.data.samples.special import SpecialIds
from gridformer.data.tokenfolder import TokenSplit
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError


class PairSamples:
    """One sample per pair of a folder whose documents alternate between source and target.

    Pairs are left out if the source is longer than source_len, or the target longer than seq_len,
    end-of-text tokens included; `n_left_out` counts them.

    Attributes:
        n_held: The tokens of all samples; what else they have is padding.
        n_positions: The positions of a sample.

    Raises:
        DataError: No pair fits.
    """

    def __init__(
        self, split: TokenSplit, source_len: int, seq_len: int, special: SpecialIds
    ) -> None:
        self.split, self.source_len, self.seq_len = split, source_len, seq_len
        self.special = special
        lengths = np.diff(split.offsets).reshape(-1, 2)
        fits = (lengths[:, 0] <= source_len) & (lengths[:, 1] <= seq_len)
        self.pairs = np.flatnonzero(fits)  # 8 bytes per pair, as much as an offset
        self.n_samples = len(self.pairs)
        self.n_left_out = len(lengths) - self.n_samples
        self.n_held, self.n_positions = int(lengths[self.pairs].sum()), source_len + seq_len
        if not self.n_samples:
            shortest = lengths[lengths.sum(axis=1).argmin()]
            raise DataError(
                f"{split.path}: none of its {len(lengths)} pairs fits data.source_len={source_len} "
                f"and data.seq_len={seq_len}: the shortest takes data.source_len={shortest[0]} and "
                f"data.seq_len={shortest[1]}"
            )

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns source and source_valid [source_len]; tokens and targets [seq_len]."""
        pair = 2 * int(self.pairs[number])
        source, target = self.split.document(pair), self.split.document(pair + 1)
        tokens = np.concatenate([[self.special.start], target[:-1]])
        return {
            "source": padded(source, self.source_len, self.special.pad),
            "source_valid": first(len(source), self.source_len),
            "tokens": padded(tokens, self.seq_len, self.special.pad),
            "targets": padded(target, self.seq_len, IGNORE),
        }
