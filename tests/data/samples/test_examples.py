"""Samples for fine-tuning: sequences of two texts, choices, and windows of contexts."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest

from gridformer.data.samples.batches import SequentialBatches, ShuffledBatches, alike
from gridformer.data.samples.examples import (
    AnswerExamples,
    ChoiceExamples,
    Reading,
    TextExamples,
    truncated,
)
from gridformer.data.samples.order import Order
from gridformer.data.samples.sample import SpecialIds
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError
from tests.support import data

CLS, SEP, PAD, EOS = 101, 102, 100, 99
ENCODER = SpecialIds(EOS, PAD, 103, CLS, SEP, PAD, (), 104, 100, frozenset())
DECODER = SpecialIds(EOS, PAD, None, None, None, PAD, (), 104, 100, frozenset())
DRAW = np.random.default_rng(0)
split_of = partial(data.split_of, eos=EOS)


def test_truncation_shortens_the_longer_text_token_by_token() -> None:
    for n_a in range(9):
        for n_b in range(9):
            for room in range(2, 17):
                a, b = n_a, n_b
                while a + b > room:
                    if a > b:
                        a -= 1
                    else:
                        b -= 1
                assert truncated(n_a, n_b, room) == (a, b)


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


def test_texts_with_and_without_parts() -> None:
    pairs = split_of([[1, 2, 3], [4]], parts=[[1, 2], [1, 0]], labels=[2, 0])
    found = TextExamples(pairs, Reading(8, ENCODER)).sample(0, DRAW)
    assert found["tokens"].tolist() == [CLS, 1, SEP, 2, 3, SEP, PAD, PAD]
    assert int(found["labels"]) == 2
    labeled = split_of([[1, 2, 3]], labels=[1])
    found = TextExamples(labeled, Reading(6, ENCODER)).sample(0, DRAW)
    assert found["tokens"].tolist() == [CLS, 1, 2, 3, SEP, PAD]


def test_choices_are_sequences_of_their_own() -> None:
    split = split_of([[1, 2, 5, 6, 7]], parts=[[2, 1, 2]], right=[1])
    found = ChoiceExamples(split, Reading(7, ENCODER), 2).sample(0, DRAW)
    assert found["tokens"].tolist() == [
        [CLS, 1, 2, SEP, 5, SEP, PAD],
        [CLS, 1, 2, SEP, 6, 7, SEP],
    ]
    assert (found["at"].tolist(), int(found["labels"])) == ([0, 0], 1)
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
        [[1, 2, *context], [3, 4, 30, 31, 32]],
        parts=[[2, 10], [2, 3]],
        answer=[[4, 5], [-1, -1]],
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


@pytest.mark.parametrize("answer", [(a, b) for b in range(7) for a in range(b + 1)], ids=str)
def test_an_answer_counts_in_each_window_that_holds_all_of_it(answer: tuple[int, int]) -> None:
    """Windows of 4 of a context of 7, whose tokens show where they are: 0 to 3, 2 to 5, 4 to 6."""
    split = split_of([[1, *range(10, 17)]], parts=[[1, 7]], answer=[answer])
    samples = AnswerExamples(split, 8, ENCODER, 2)
    whole = [10 + place for place in answer]
    for number in range(3):
        found = samples.sample(number, DRAW)
        tokens, (low, high) = found["tokens"].tolist(), found["answer"].tolist()
        held = all(token in tokens for token in whole)
        assert [tokens[low], tokens[high]] == (whole if held else [CLS, CLS])


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
