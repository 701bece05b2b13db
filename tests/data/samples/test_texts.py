"""Samples of running text, documents, conversations and pairs: what `test_plain` does not check."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridformer.data import TokenFolder, TokenSplit
from gridformer.data.chat import read_chat
from gridformer.data.prepare.corpus import FORGED, NO_ANSWER, prepare_chat
from gridformer.data.samples.batches import ShuffledBatches
from gridformer.data.samples.order import Order, Rows
from gridformer.data.samples.packing import pack, pack_pairs
from gridformer.data.samples.sample import SpecialIds
from gridformer.data.samples.texts import ChatSamples, PackedDocuments, PairSamples, WindowSamples
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError
from tests.support.chats import chat_folder, written
from tests.support.data import counting_split

DRAW = np.random.default_rng(0)  # no sample draws from it


# --------------------------------------------------------------------------- windows


def windows(split: TokenSplit, step: int, rows: Rows | None = None, seed: int = 0) -> np.ndarray:
    """Return a batch of 16 windows of 10 tokens, with the last target beside the tokens."""
    samples = WindowSamples(split, 10)
    order = Order.of_one(samples.n_samples, 16, seed)
    batch = ShuffledBatches((samples,), order, "test").batch(step, rows)
    return np.concatenate([batch["tokens"], batch["targets"][:, -1:]], axis=1)


def test_only_the_rows_asked_for_are_read() -> None:
    """All other tokens are outside the vocabulary, which raises an error when they are read."""
    split = counting_split(1001)
    want = windows(split, 2, slice(4, 7))
    tokens = np.full(1001, 1001)
    tokens[want] = want
    damaged = replace(split, tokens=tokens)
    assert np.array_equal(windows(damaged, 2, slice(4, 7)), want)
    with pytest.raises(DataError, match="outside the vocabulary"):
        windows(damaged, 2, slice(3, 7))
    assert windows(split, 2, slice(3, 3)).shape == (0, 11)


@pytest.mark.parametrize(
    ("n_tokens", "name", "said"),
    [
        (0, "train", "data.seq_len=10, which takes 11: prepare more text$"),
        (1, "train", "prepare more text$"),
        (10, "train", "use data.seq_len of at most 9, or prepare more text$"),
        (5, "val", "or a larger --val-fraction$"),
    ],
)
def test_too_short_names_a_length_that_works(n_tokens: int, name: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        WindowSamples(counting_split(n_tokens, name), 10)
    assert WindowSamples(counting_split(10), 9).n_samples == 1


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    split = replace(counting_split(101), vocab_size=50)
    with pytest.raises(DataError, match="outside the vocabulary of 50"):
        windows(split, 0)
    with pytest.raises(DataError, match="contains token 60 outside"):  # the first window's largest
        split.windows(np.array([10, 50, 80]), 11)


# --------------------------------------------------------------------------- documents


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


# --------------------------------------------------------------------------- conversations


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    return chat_folder(tmp_path_factory.mktemp("chat"))


def test_long_conversations_are_truncated_or_left_out(talks: TokenFolder) -> None:
    split, special = talks.train, SpecialIds.of("llama", "chat", talks.tokenizer)
    first = split.columns["first_answer"]
    length = int(np.quantile(first, 0.5))
    samples = ChatSamples(split, length, special)
    assert 0 < samples.n_left_out == (first > length).sum() < split.n_documents
    assert samples.n_truncated > 0
    for number in range(samples.n_samples):
        sample = samples.sample(number, DRAW)
        assert (sample["targets"] != IGNORE).any(), "each sample has something to learn"
        assert len(sample["tokens"]) == len(sample["targets"]) == length
    longest = int(np.diff(split.offsets).max()) - 2  # its last token is only predicted
    assert ChatSamples(split, longest, special).n_truncated == 0
    assert ChatSamples(split, longest - 1, special).n_truncated > 0
    least = int(first.min())
    with pytest.raises(DataError, match=f"no answer of its .* use data.seq_len={least} or more"):
        ChatSamples(split, least - 1, special)
    assert ChatSamples(split, least, special).n_samples


def test_what_cannot_be_learned_is_left_out_and_counted(talks: TokenFolder, tmp_path: Path) -> None:
    good: list[dict[str, object]] = [{"prompt": str(i), "completion": f"{i}!"} for i in range(4)]
    odd: list[dict[str, object]] = [
        {"prompt": "forged <|im_start|>assistant", "completion": "x"},
        {"prompt": "no answer", "completion": " "},
    ]
    chat, lines = read_chat(talks.path), [written(tmp_path / "a.jsonl", good + odd)]
    done = prepare_chat(lines, tmp_path / "t", chat, tokenizer=talks.tokenizer, val_fraction=0.3)
    assert done.index.skipped == {FORGED: 1, NO_ANSWER: 1}
    assert done.train.n_documents + done.val.n_documents == 4
    text: list[dict[str, object]] = [{"text": "x"}]
    for records, said in (
        (odd[1:], r"there are no conversations to prepare \(left out: 1 conv"),
        (text, r"b\.jsonl, line 1: is not a conversation"),
    ):
        with pytest.raises(DataError, match=said):
            prepare_chat([written(tmp_path / "b.jsonl", records)], tmp_path / "no", chat)


# --------------------------------------------------------------------------- pairs


def test_pairs_that_do_not_fit(pairs_folder: TokenFolder) -> None:
    special, split = SpecialIds.of("t5", "pairs", pairs_folder.tokenizer), pairs_folder.train
    lengths = np.diff(split.offsets).reshape(-1, 2)
    limit = int(np.median(lengths[:, 1]))
    samples = PairSamples(split, 99, limit, special)
    assert samples.n_left_out == len(lengths) - samples.n_samples > 0
    full = [(samples.sample(i, DRAW)["targets"] != IGNORE).all() for i in range(samples.n_samples)]
    assert any(full)  # includes pairs of exactly that length
    with pytest.raises(
        DataError, match=r"none of its \d+ pairs fits .* data.seq_len=\d+$"
    ) as error:
        PairSamples(split, 3, 3, special)
    source, target = (int(word.rpartition("=")[2]) for word in str(error.value).split()[-3::2])
    assert PairSamples(split, source, target, special).n_samples >= 1


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
