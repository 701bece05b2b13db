"""Pairs: both texts are whole, ended and padded, or the pair is left out."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridformer.config import RunConfig
from gridformer.data import RunData, TokenFolder, open_training, resolve
from gridformer.data.samples.pair_packing import pack_pairs
from gridformer.data.samples.special import SpecialIds
from gridformer.data.samples.translation import PackedPairs, PairSamples
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


@pytest.mark.parametrize("lengths", [(64, 64), (40, 30)])
def test_packed_pairs_are_those_of_other_samples(
    pairs_folder: TokenFolder, special: SpecialIds, lengths: tuple[int, int]
) -> None:
    alone = PairSamples(pairs_folder.train, *lengths, special)
    packed = PackedPairs(pairs_folder.train, *lengths, special)
    assert packed.n_left_out == alone.n_left_out
    assert packed.n_held == alone.n_held
    assert packed.n_samples < alone.n_samples
    found = []
    for number in range(packed.n_samples):
        row = packed.sample(number, DRAW)
        said, n = row["targets"] != IGNORE, int(row["documents"].max()) + 1
        for pair in range(n):
            sides = []
            for prefix, real in (("source_", row["source_valid"]), ("", said)):
                here = (row[f"{prefix}documents"] == pair) & real
                assert np.array_equal(row[f"{prefix}positions"][here], np.arange(here.sum()))
                sides.append(here)
            source, target = sides
            texts = row["source"][source], row["tokens"][target], row["targets"][target]
            found.append(tuple(tuple(text.tolist()) for text in texts))
        # No text sees padding, and padding sees something.
        assert (row["source_documents"][~row["source_valid"]] == n).all()
        assert (row["documents"][~said] == n - 1).all()
        for key in ("source_documents", "documents"):
            assert set(np.diff(row[key])) <= {0, 1}
        assert row["source_valid"].sum() + said.sum() == sum(
            len(source) + len(target) for source, _, target in found[-n:]
        )
    want = []
    for number in range(alone.n_samples):
        one = alone.sample(number, DRAW)
        said = one["targets"] != IGNORE
        texts = one["source"][one["source_valid"]], one["tokens"][said], one["targets"][said]
        want.append(tuple(tuple(text.tolist()) for text in texts))
    assert sorted(found) == sorted(want)


def test_sources_of_packed_pairs_are_mixed(pairs_folder: TokenFolder) -> None:
    """Each goes through all of its rows before it reads one again."""
    names = ("one", "other")
    sources = [{"name": name, "path": pairs_folder.path, "weight": 1} for name in names]
    run = RunConfig.model_validate(
        {
            "model": {"family": "t5", "n_layers": 1, "hidden_size": 8, "n_heads": 2},
            "data": {
                "sources": sources,
                "task": "pairs",
                "seq_len": 64,
                "source_len": 64,
                "document_mask": True,
                "packing": "documents",
            },
            "train": {"global_batch": 2},
        }
    )
    data = RunData.open(run.data)
    run = resolve(run, data)
    special = SpecialIds.of("t5", "pairs", pairs_folder.tokenizer)
    packed = PackedPairs(pairs_folder.train, 64, 64, special)
    want = [packed.sample(number, DRAW) for number in range(packed.n_samples)]
    batches = open_training(run, data)
    steps = [batches.batch(step) for step in range(packed.n_samples)]
    assert steps[0].keys() == want[0].keys()
    found = sorted(row.tobytes() for step in steps for row in step["source"])
    assert found == sorted(2 * [one["source"].tobytes() for one in want])
