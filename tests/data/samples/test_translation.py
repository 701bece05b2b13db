"""Pairs: both texts are whole, ended and padded, or the pair is left out."""

import numpy as np
import pytest

from gridformer.data import TokenFolder
from gridformer.data.samples.special import SpecialIds
from gridformer.data.samples.translation import PairSamples
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError

DRAW = np.random.default_rng(0)


@pytest.fixture
def special(pairs_folder: TokenFolder) -> SpecialIds:
    return SpecialIds.of("transformer", "pairs", pairs_folder.tokenizer)


def test_a_sample_is_a_pair(pairs_folder: TokenFolder, special: SpecialIds) -> None:
    samples = PairSamples(pairs_folder.train, 64, 64, special)
    assert samples.n_samples == pairs_folder.train.n_documents // 2
    assert samples.n_left_out == 0
    decode = pairs_folder.tokenizer.decode
    for number in range(samples.n_samples):
        sample = samples.sample(number, DRAW)
        source = sample["source"][sample["source_valid"]]
        said = sample["targets"] != IGNORE
        target = sample["targets"][said]
        assert source[-1] == target[-1] == special.eos
        assert decode(source[:-1].tolist()).upper() == decode(target[:-1].tolist())
        assert (sample["source"][~sample["source_valid"]] == special.pad).all()
        assert sample["tokens"][0] == special.start
        assert np.array_equal(sample["tokens"][1 : len(target)], target[:-1])
        assert (sample["tokens"][~said] == special.pad).all()
        # Real tokens come first.
        assert (np.diff(said.astype(int)) <= 0).all()
        assert (np.diff(sample["source_valid"].astype(int)) <= 0).all()


def test_long_pairs_are_left_out_and_counted(
    pairs_folder: TokenFolder, special: SpecialIds
) -> None:
    lengths = np.diff(pairs_folder.train.offsets).reshape(-1, 2)
    limit = int(np.median(lengths[:, 1]))
    samples = PairSamples(pairs_folder.train, 99, limit, special)
    assert samples.n_samples == (lengths[:, 1] <= limit).sum()
    assert samples.n_left_out == len(lengths) - samples.n_samples > 0
    full = [(samples.sample(i, DRAW)["targets"] != IGNORE).all() for i in range(samples.n_samples)]
    assert any(full)  # includes pairs of exactly that length


def test_none_fits(pairs_folder: TokenFolder, special: SpecialIds) -> None:
    with pytest.raises(
        DataError, match=r"none of its \d+ pairs fits .* data.seq_len=\d+$"
    ) as error:
        PairSamples(pairs_folder.train, 3, 3, special)
    source, target = (int(word.rpartition("=")[2]) for word in str(error.value).split()[-3::2])
    assert PairSamples(pairs_folder.train, source, target, special).n_samples >= 1
