"""Samples that know their documents: what is in them, and that nothing is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gridformer.data.samples.packing import pack
from gridformer.data.samples.sample import Arrays
from gridformer.data.samples.texts import PackedDocuments
from gridformer.data.tokenfolder import TokenSplit
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError

DRAW = np.random.default_rng(0)  # no sample draws from it
lengths_of = st.lists(st.integers(0, 14), min_size=1, max_size=12)


def split_of(lengths: list[int]) -> TokenSplit:
    """Return documents of these lengths, in which token i has the number i."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenSplit("train", Path("x.bin"), np.arange(offsets[-1]), offsets, 1000)


def owner_of(split: TokenSplit, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.searchsorted(split.offsets, tokens, side="right") - 1


def check_places(one: Arrays) -> None:
    """Positions count from 0 in each of the documents, whose numbers ascend from 0."""
    documents, positions = one["documents"], one["positions"]
    assert documents[0] == 0
    assert (np.diff(documents) >= 0).all()
    for number in np.unique(documents):
        here = positions[documents == number]
        assert np.array_equal(here, np.arange(len(here)))


@given(lengths=lengths_of, seq_len=st.integers(1, 9))
def test_every_target_is_in_one_packed_sample(lengths: list[int], seq_len: int) -> None:
    split = split_of(lengths)
    within = [t for t in range(split.n_tokens - 1) if t + 1 not in np.asarray(split.offsets)]
    if not within:
        with pytest.raises(DataError, match="two tokens"):
            PackedDocuments(split, seq_len, pad=0)
        return
    samples, found = PackedDocuments(split, seq_len, pad=999), []
    for number in range(samples.n_samples):
        one = samples.sample(number, DRAW)
        valid = one["valid"]
        tokens, targets = one["tokens"][valid], one["targets"][valid]
        assert all(len(value) == seq_len for value in one.values())
        assert np.array_equal(targets, tokens + 1)
        assert (one["tokens"][~valid] == 999).all()
        assert (one["targets"][~valid] == IGNORE).all()
        # Each document of the sample is a part of one of the split, and is whole if it fits.
        for which in np.unique(one["documents"][valid]):
            part = tokens[one["documents"][valid] == which]
            (owner,) = set(owner_of(split, part).tolist())
            n_places = split.document_length(owner) - 1
            assert np.array_equal(part, part[0] + np.arange(len(part)))
            assert len(part) == n_places or n_places > seq_len
        assert not set(one["documents"][valid]) & set(one["documents"][~valid])
        check_places(one)
        found += tokens.tolist()
    assert sorted(found) == within


def test_packing_leaves_little_padding() -> None:
    """Of many documents of different lengths; the time does not matter here."""
    lengths = np.random.default_rng(1).lognormal(5, 1, 20_000).astype(np.int64) + 2
    packed = pack(np.concatenate([[0], lengths.cumsum()]), 512)
    assert (lengths - 1).sum() / (512 * packed.n_samples) > 0.999
    assert np.add.reduceat(packed.places, packed.bounds[:-1]).max() == 512


def test_as_few_samples_as_possible() -> None:
    """Pairs that fit together are found, and documents of one length share samples."""
    offsets = np.concatenate([[0], np.cumsum([7, 5, 4, 6, 3, 3, 3])])
    packed = pack(offsets, 8)
    samples = np.split(packed.places, packed.bounds[1:-1])
    assert sorted(sample.tolist() for sample in samples) == [[4, 2, 2], [5, 3], [6, 2]]
