"""Samples for fine-tuning: sequences of two texts, choices, windows of contexts, special ids."""

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from gridformer.data import TokenFolder
from gridformer.data.samples.batches import SequentialBatches, ShuffledBatches, alike
from gridformer.data.samples.examples import (
    AnswerExamples,
    ChoiceExamples,
    LabeledDocuments,
    Reading,
    TextExamples,
)
from gridformer.data.samples.order import Order
from gridformer.data.samples.sample import SENTINELS, SpecialIds
from gridformer.data.tokenizer import Tokenizer
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError
from tests.support import data

CLS, SEP, PAD, EOS = 101, 102, 100, 99
ENCODER = SpecialIds(EOS, PAD, 103, CLS, SEP, PAD, (), 104, 100, frozenset())
DECODER = SpecialIds(EOS, PAD, None, None, None, PAD, (), 104, 100, frozenset())
DRAW = np.random.default_rng(0)
split_of = partial(data.split_of, eos=EOS)


def test_a_decoder_that_pads_with_the_end_of_text_reads_none_at_the_end() -> None:
    """transformers takes the last token that is not padding, which `at` must be."""
    same = dataclasses.replace(DECODER, pad=EOS)
    a, b, none = np.array([1, 2, 3]), np.array([7, 8]), np.array([], dtype=np.int64)
    two, one = Reading(8, same).sequence(a, b), Reading(4, same).sequence(a, none)
    assert two["tokens"].tolist() == [1, 2, 3, EOS, 7, 8, EOS, EOS]
    assert (int(two["valid"].sum()), int(two["at"])) == (6, 5)
    assert (one["tokens"].tolist(), int(one["at"])) == ([1, 2, 3, EOS], 2)
    empty = Reading(4, same).sequence(none, none)
    assert (int(empty["valid"].sum()), int(empty["at"])) == (1, 0)


def test_a_decoder_reads_what_its_tokenizer_puts_before_a_text() -> None:
    reading = Reading(8, dataclasses.replace(DECODER, begin=(90, 91)))
    assert reading.joined([1, 2, 3], [7, 8]) == ([90, 91, 1, 2, EOS, 7, 8, EOS], 5)
    assert reading.joined([]) == ([90, 91, EOS], 3)
    # Documents of `prepare --bos` have it already.
    assert reading.joined([90, 91, 1]) == ([90, 91, 1, EOS], 4)
    pads = Reading(8, dataclasses.replace(DECODER, begin=(90,), pad=EOS))
    assert pads.joined([1, 2])[0] == [90, 1, 2]
    assert pads.joined([])[0] == [90]


def test_numbers_are_labels() -> None:
    split = split_of([[1, 2], [3]], parts=[[1, 1], [1, 0]], value=[0.5, 3.25])
    whole = SequentialBatches(TextExamples(split, Reading(6, DECODER), "value"), 3).batch(0)
    assert whole["labels"].dtype == np.float32
    assert whole["labels"][:2].tolist() == [0.5, 3.25]
    assert np.isnan(whole["labels"][2])
    assert whole["tokens"][1].tolist() == [3, EOS, *[PAD] * 4]


def test_a_text_without_parts_and_choices_that_are_too_few() -> None:
    labeled = split_of([[1, 2, 3]], labels=[1])
    sample = TextExamples(labeled, Reading(6, ENCODER)).sample(0, DRAW)
    assert sample["tokens"].tolist() == [CLS, 1, 2, 3, SEP, PAD]
    split = split_of([[1, 2, 5, 6, 7]], parts=[[2, 1, 2]], right=[1])
    with pytest.raises(DataError, match=r"have 2 choices.*use data\.n_choices=2"):
        ChoiceExamples(split, Reading(7, ENCODER), 4)


@pytest.mark.parametrize("special", [ENCODER, DECODER])
@pytest.mark.parametrize("two_stacks", [False, True])
def test_choices_that_truncation_makes_equal_are_counted(
    special: SpecialIds, two_stacks: bool
) -> None:
    """The ends of the first and of the last question's choices differ, which 9 tokens do not hold.

    Those of the second begin differently, and those of the third fit.
    """
    rows = [
        [1, 2, 3, *range(5, 13), 50, *range(5, 13), 51],
        [1, 2, 3, 50, *range(5, 13), 51, *range(5, 13)],
        [1, 2, 3, 50, 51],
        [*range(5, 15), 50, *range(5, 15), 51],
    ]
    split = split_of(rows, parts=[[3, 9, 9], [3, 9, 9], [3, 1, 1], [0, 11, 11]], right=[0, 1, 0, 1])
    few = ChoiceExamples(split, Reading(9, special, two_stacks), 2)
    assert (few.n_alike, ChoiceExamples(split, Reading(20, special, two_stacks), 2).n_alike) == (
        2,
        0,
    )
    (said,) = alike(
        SequentialBatches(few, 2),
        ShuffledBatches((few,), Order.of_one(few.n_samples, 2, 0), "test"),
    )
    assert said.startswith("Warning: at least 4 of 8 questions have choices that are equal once")
    assert not alike(
        SequentialBatches(TextExamples(split_of([[1]], labels=[0]), Reading(9, special)), 1)
    )


def test_windows_cover_contexts_and_hold_answers() -> None:
    """A question of 2 and contexts of 10 and 3 tokens, in windows of 4 that begin 3 apart."""
    context = [*range(10, 20)]
    split = split_of(
        [[1, 2, *context], [3, 4, 30, 31, 32]], parts=[[2, 10], [2, 3]], answer=[[4, 5], [-1, -1]]
    )
    samples = AnswerExamples(split, 9, ENCODER, 3, evaluating=True)
    assert samples.n_samples == 4
    found = [samples.sample(number, DRAW) for number in range(4)]
    assert [one["tokens"].tolist() for one in found] == [
        [CLS, 1, 2, SEP, 10, 11, 12, 13, SEP],
        [CLS, 1, 2, SEP, 13, 14, 15, 16, SEP],
        [CLS, 1, 2, SEP, 16, 17, 18, 19, SEP],
        [CLS, 3, 4, SEP, 30, 31, 32, SEP, PAD],
    ]
    assert [one["answer"].tolist() for one in found] == [[0, 0], [5, 6], [0, 0], [0, 0]]
    assert found[3]["segments"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 0]
    # Token 13 is at the end of the first window and at the beginning of the second: the first one
    # wins. Every token may begin an answer in one window, and end it in all.
    assert [one["context"].tolist()[4:8] for one in found] == [
        [2, 2, 2, 2],
        [1, 2, 2, 2],
        [1, 2, 2, 2],
        [2, 2, 2, 0],
    ]
    window = samples.window(2)
    assert (window.document, window.start, window.length, window.place) == (0, 6, 4, 4)
    decoder = AnswerExamples(split, 9, DECODER, 3).sample(1, DRAW)
    assert decoder["tokens"].tolist() == [EOS, 1, 2, EOS, 13, 14, 15, 16, EOS]
    assert (decoder["answer"].tolist(), "segments" in decoder) == ([5, 6], False)
    begins = dataclasses.replace(DECODER, begin=(90, 91))
    longer = AnswerExamples(split, 10, begins, 3).sample(1, DRAW)
    assert longer["tokens"].tolist() == [90, 91, 1, 2, EOS, 13, 14, 15, 16, EOS]
    assert longer["answer"].tolist() == [6, 7]


def test_every_sample_once() -> None:
    split = split_of([[i] for i in range(1, 6)], labels=[0, 1, 0, 1, 1])
    whole = SequentialBatches(TextExamples(split, Reading(4, ENCODER)), 4)
    assert (whole.numbers, whole.n_samples) == (range(2), 5)
    last = whole.batch(1)
    assert last["item"].tolist() == [4, 5, 5, 5]
    assert last["labels"].tolist() == [1, IGNORE, IGNORE, IGNORE]
    assert last["tokens"][:, 1].tolist() == [5, 1, 1, 1]
    some = whole.batch(1, np.array([2, 0]))
    assert some["item"].tolist() == [5, 4]
    assert whole.batch(0, np.zeros(0, dtype=np.int64))["tokens"].shape == (0, 4)


@pytest.mark.parametrize("seq_len", [200, 10])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_labeled_documents(labeled_folder: TokenFolder, family: Any, seq_len: int) -> None:
    """Labels are the first words. A document that is too long is truncated."""
    task: Any = {"gpt2": "causal", "bert": "masked"}[family]
    special, folder = SpecialIds.of(family, task, labeled_folder.tokenizer), labeled_folder
    samples = LabeledDocuments(folder.train, seq_len, special)
    assert samples.n_samples == folder.train.n_documents
    for number in range(samples.n_samples):
        sample: dict[str, Any] = samples.sample(number, DRAW)
        text, valid = folder.train.document(number).tolist()[:-1], sample["valid"]
        said = sample["targets"] != IGNORE
        if family == "gpt2":
            ids = [*text, special.eos]
            assert sample["tokens"][valid].tolist() == ids[:seq_len]
            assert sample["targets"][said].tolist() == ids[1 : seq_len + 1]
            assert said.tolist() == [i < len(ids) - 1 for i in range(seq_len)]
            assert sample["at"] == valid.sum() - 1 == min(len(ids), seq_len) - 1
        else:
            ids, short = np.where(said, sample["targets"], sample["tokens"]), text[: seq_len - 2]
            assert ids[valid].tolist() == [special.cls, *short, special.sep]
            assert (ids[~valid] == special.pad).all()
            assert said.sum() == max(1, (15 * len(short) + 50) // 100)
            assert sample["at"] == 0
        label = folder.index.labels[sample["labels"]]
        assert label == folder.tokenizer.decode(text).split()[0]


BYTES = Tokenizer.train(data.sentences(50), 300)


def words(*special: str) -> Tokenizer:
    """Return a tokenizer with ten words, followed by special tokens."""
    backend = tokenizers.Tokenizer(
        models.WordLevel({f"w{i}": i for i in range(10)}, unk_token="w0")
    )
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, "words")


def test_new_ids_come_behind_the_vocabulary_in_a_fixed_order() -> None:
    ids = SpecialIds.of("bert", "masked", BYTES)
    assert (ids.pad, ids.mask, ids.cls, ids.sep) == (300, 301, 302, 303)
    assert (ids.vocab_size, ids.ordinary_size) == (304, 300)
    assert ids.eos == BYTES.eos_id
    assert ids.not_words == {BYTES.eos_id}
    assert ids.sentinels == ()


def test_the_tokenizers_own_are_used() -> None:
    bert = words("[UNK]", "[SEP]", "[MASK]", "[PAD]", "[CLS]")
    ids = SpecialIds.of("bert", "masked", bert)
    assert (ids.sep, ids.mask, ids.pad, ids.cls) == (11, 12, 13, 14)
    assert ids.vocab_size == ids.ordinary_size == 15
    assert ids.not_words == {10, 11, 12, 13, 14}
    roberta = SpecialIds.of("bert", "masked", words("<s>", "</s>", "<mask>"))
    assert (roberta.cls, roberta.sep, roberta.mask, roberta.pad) == (10, 11, 12, 13)
    assert roberta.eos == roberta.sep
    assert roberta.vocab_size == 14


def test_causal_adds_nothing() -> None:
    ids = SpecialIds.of("gpt2", "causal", BYTES)
    assert ids.vocab_size == 300
    assert ids.pad == ids.eos
    assert SpecialIds.of("gpt2", "causal", words("</s>", "<pad>")).pad == 11


def test_decoders_start_as_published() -> None:
    t5 = SpecialIds.of("t5", "pairs", BYTES)
    assert t5.start == t5.pad == 300
    transformer = SpecialIds.of("transformer", "pairs", BYTES)
    assert transformer.start == transformer.eos
    assert transformer.vocab_size == 301


def test_sentinels() -> None:
    ids = SpecialIds.of("t5", "spans", BYTES, n_sentinels=3)
    assert ids.sentinels == tuple(range(301, 301 + SENTINELS))
    assert ids.vocab_size == 401
    many = SpecialIds.of("t5", "spans", BYTES, n_sentinels=150)
    assert len(set(many.sentinels)) == 150
    # T5's own sentinels are in reverse order; missing ones follow the vocabulary.
    own = SpecialIds.of("t5", "spans", words("</s>", "<pad>", "<extra_id_1>", "<extra_id_0>"))
    assert own.sentinels[:3] == (13, 12, 14)
    assert own.vocab_size == 14 + 98
