"""Pairs: both texts are whole, ended and padded, or the pair is left out."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridformer.data import TokenFolder
from gridformer.data.samples.packing import pack_pairs
from gridformer.data.samples.sample import SpecialIds
from gridformer.data.samples.texts import PairSamples
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError

DRAW = np.random.default_rng(0)


@pytest.fixture
def special(pairs_folder: TokenFolder) -> SpecialIds:
    return SpecialIds.of("transformer", "pairs", pairs_folder.tokenizer)


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


# --------------------------------------------------------------------------- several in a sample


@given(st.data(), st.tuples(st.integers(1, 12), st.integers(1, 12)))
def test_every_pair_is_in_one_row_that_holds_both_texts(
    data: st.DataObject, room: tuple[int, int]
) -> None:
    one = st.tuples(*(st.integers(1, length) for length in room))
    lengths = np.array(data.draw(st.lists(one, min_size=1, max_size=40)))
    order, bounds = pack_pairs(lengths, room)
    assert sorted(order) == [*range(len(lengths))]
    assert (bounds[0], bounds[-1]) == (0, len(lengths))
    for begin, end in itertools.pairwise(bounds):
        assert end > begin
        assert (lengths[order[begin:end]].sum(0) <= room).all()


def test_pairs_that_fill_a_row_together_share_it() -> None:
    """Of these, no two orders of rows hold as much: each long text is beside a short one."""
    lengths = np.array([[7, 2], [1, 6], [4, 5], [4, 3], [2, 6], [6, 2]])
    order, bounds = pack_pairs(lengths, (8, 8))
    rows = [sorted(part.tolist()) for part in np.split(order, bounds[1:-1])]
    assert sorted(rows) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(("room", "excess"), [((128, 128), 0.01), ((64, 96), 0.025)])
def test_rows_of_pairs_have_little_padding(room: tuple[int, int], excess: float) -> None:
    """Lengths like those of sentences: a target is about as long as its source.

    Rows in which each pair took as much as the longer of its texts would be 7% more.
    """
    draw = np.random.default_rng(1)
    source = draw.lognormal(3.1, 0.6, 30_000)
    both = np.stack([source, source * room[1] / room[0] * draw.lognormal(0, 0.2, 30_000)], 1)
    lengths = both.astype(np.int64) + 2
    lengths = lengths[(lengths <= room).all(1)]
    _, bounds = pack_pairs(lengths, room)
    least = (lengths.sum(0) / room).max()  # rows that the fuller side takes
    assert len(bounds) - 1 <= (1 + excess) * least
