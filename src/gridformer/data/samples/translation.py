"""Samples of translation: the model reads the first text of a pair and generates the second.

A sample is one pair, or several pairs side by side that do not see one another.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.documents import places_of
from gridformer.data.samples.packing import pack_pairs
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
        return self._texts(*self._read(int(self.pairs[number])))

    def _read(self, pair: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Returns the source of a pair, and the tokens and the targets of its decoder."""
        source, target = self.split.document(2 * pair), self.split.document(2 * pair + 1)
        return source, np.concatenate([[self.special.start], target[:-1]]), target

    def _texts(
        self, source: NDArray[np.int64], tokens: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> Arrays:
        return {
            "source": padded(source, self.source_len, self.special.pad),
            "source_valid": first(len(source), self.source_len),
            "tokens": padded(tokens, self.seq_len, self.special.pad),
            "targets": padded(targets, self.seq_len, IGNORE),
        }


class PackedPairs(PairSamples):
    """Samples of several whole pairs each, for `data.packing: documents`.

    Sources are side by side in the row of the encoder, and targets, in the same order, in that of
    the decoder. Every pair that fits is in one sample; others are left out as in PairSamples.
    """

    def __init__(
        self, split: TokenSplit, source_len: int, seq_len: int, special: SpecialIds
    ) -> None:
        super().__init__(split, source_len, seq_len, special)
        lengths = np.diff(split.offsets).reshape(-1, 2)[self.pairs]
        order, self.bounds = pack_pairs(lengths, (source_len, seq_len))
        self.pairs, self.n_samples = self.pairs[order], len(self.bounds) - 1

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns what PairSamples does, and the documents and positions of source and tokens."""
        begin, end = self.bounds[number : number + 2].tolist()
        read = [self._read(pair) for pair in self.pairs[begin:end].tolist()]
        source, tokens, targets = (np.concatenate(texts) for texts in zip(*read))
        of_source, of_tokens = (
            np.repeat(np.arange(len(read)), [len(texts[side]) for texts in read]) for side in (0, 1)
        )
        # No token of a pair may see the padding behind sources, so it has a number of its own. The
        # padding behind targets continues the last pair, so that it has a source to see. Nothing
        # before it sees it, because the decoder is causal.
        for_encoder = places_of(padded(of_source, self.source_len, len(read)), True)
        for_decoder = places_of(padded(of_tokens, self.seq_len, len(read) - 1), True)
        return {
            **self._texts(source, tokens, targets),
            **{f"source_{key}": value for key, value in for_encoder.items()},
            **for_decoder,
        }
