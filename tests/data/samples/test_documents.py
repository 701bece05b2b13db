"""Samples that know their documents: what is in them, and that nothing is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from gridformer.data.samples.packing import pack
from gridformer.data.samples.texts import PackedDocuments
from gridformer.data.tokenfolder import TokenSplit
from gridformer.utils.errors import DataError

DRAW = np.random.default_rng(0)  # no sample draws from it
lengths_of = st.lists(st.integers(0, 14), min_size=1, max_size=12)


def split_of(lengths: list[int]) -> TokenSplit:
    """Return documents of these lengths, in which token i has the number i."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenSplit("train", Path("x.bin"), np.arange(offsets[-1]), offsets, 1000)


def test_packing_leaves_little_padding() -> None:
    """Of many documents of different lengths; the time does not matter here."""
    lengths = np.random.default_rng(1).lognormal(5, 1, 20_000).astype(np.int64) + 2
    _, places, bounds = pack(np.concatenate([[0], lengths.cumsum()]), 512)
    assert (lengths - 1).sum() / (512 * (len(bounds) - 1)) > 0.999
    assert np.add.reduceat(places, bounds[:-1]).max() == 512


def test_as_few_samples_as_possible() -> None:
    """Pairs that fit together are found, and documents of one length share samples."""
    offsets = np.concatenate([[0], np.cumsum([7, 5, 4, 6, 3, 3, 3])])
    _, places, bounds = pack(offsets, 8)
    samples = np.split(places, bounds[1:-1])
    assert sorted(sample.tolist() for sample in samples) == [[4, 2, 2], [5, 3], [6, 2]]


def test_documents_without_two_tokens_are_refused() -> None:
    with pytest.raises(DataError, match="two tokens"):
        PackedDocuments(split_of([1, 0, 1]), 4, pad=0)
    assert PackedDocuments(split_of([1, 0, 2]), 4, pad=0).n_samples == 1
