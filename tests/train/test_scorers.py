"""Scores of fine-tuning against examples worked out by hand, and published definitions."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gridformer.data import Tokenizer
from gridformer.data.samples.examples import AnswerExamples
from gridformer.data.samples.sample import SpecialIds
from gridformer.train.scorers import (
    AnswerSpans,
    answer_scores,
    best_spans,
    label_scores,
    normalized,
    regression_scores,
    word_f1,
)
from tests.support.tasks import examples


def test_scores_of_two_labels() -> None:
    """4 true positives, 1 false positive, 2 false negatives, 3 true negatives."""
    pairs = [(1, 1)] * 4 + [(1, 0)] + [(0, 1)] * 2 + [(0, 0)] * 3
    scores = label_scores(torch.tensor(pairs), 2)
    assert scores["accuracy"] == 7 / 10
    assert scores["f1"] == pytest.approx(2 * (4 / 5) * (4 / 6) / (4 / 5 + 4 / 6))
    assert scores["matthews"] == pytest.approx((4 * 3 - 1 * 2) / math.sqrt(5 * 6 * 4 * 5))


def test_scores_of_labels_that_do_not_occur() -> None:
    none = label_scores(torch.zeros(2, 2), 2)
    assert none == {"accuracy": 1.0, "f1": 0.0, "matthews": 0.0}
    assert label_scores(torch.tensor([[2, 2], [0, 1], [1, 1]]), 3) == {"accuracy": 2 / 3}


def test_correlations_of_numbers() -> None:
    """The ranks of 2, 2 and 5 are 1.5, 1.5 and 3."""

    def scores_of(said: list[float], wanted: list[float]) -> dict[str, float]:
        return regression_scores(torch.tensor([said, wanted], dtype=torch.float64).t())

    scores = scores_of([1.0, 2.0, 3.0], [2.0, 2.0, 5.0])
    assert scores["pearson"] == pytest.approx(3 / math.sqrt(2 * 6))
    assert scores["spearman"] == pytest.approx(1.5 / math.sqrt(2 * 1.5))
    assert scores_of([1.0, 1.0], [0.0, 3.0]) == {"pearson": 0.0, "spearman": 0.0}
    assert scores_of([0.1, 7.0, 8.0], [3.0, 2.0, 1.0])["spearman"] == pytest.approx(-1.0)


def test_answers_are_compared_without_articles_case_and_punctuation() -> None:
    assert normalized("  The Cat's, (an) APPLE! ") == "cats apple"
    assert word_f1("the cat sat", "A cat sat down") == pytest.approx(2 * 2 / (2 + 3))
    assert word_f1("cat cat", "cat") == pytest.approx(2 * 1 / 3)
    assert (word_f1("", ""), word_f1("the", ""), word_f1("cat", "")) == (1.0, 1.0, 0.0)


def test_the_best_of_several_right_answers_counts() -> None:
    scores = answer_scores(["Norman kings", ""], [["the Normans", "Norman kings"], []])
    assert (scores["exact_match"], scores["f1"]) == (1.0, 1.0)
    scores = answer_scores(["Norman kings", "Rome"], [["Normans", "kings of Normandy"], []])
    assert scores["exact_match"] == 0.0
    assert scores["f1"] == pytest.approx((2 * 1 / (2 + 3) + 0.0) / 2)
    assert scores["f1_has_answer"] == pytest.approx(0.4)
    assert scores["exact_match_no_answer"] == 0.0
    assert "f1_no_answer" not in answer_scores(["a fox"], [["fox"]])


def test_best_spans_are_those_of_a_search_over_all() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 2, 12, generator=generator)
    context = torch.randint(0, 3, (5, 12), generator=generator)
    context[4] = 0
    for longest in (1, 4, 30):
        found = best_spans(logits, context, longest)
        for row in range(5):
            spans = [
                (float(logits[row, 0, i].double() + logits[row, 1, j].double()), i, j)
                for i in range(12)
                for j in range(i, min(12, i + longest))
                if context[row, i] == 2 and context[row, j] >= 1
            ]
            score, low, high = max(spans, default=(-math.inf, 0, 0))
            assert found[row, 0] == score
            assert not spans or found[row, 1:3].tolist() == [low, high]
            assert found[row, 3] == logits[row, :, 0].double().sum()


SEQ, STRIDE, LONGEST = 24, 7, 4


def searched(
    tokenizer: Tokenizer, asked: dict[str, Any], logits: Iterator[Tensor], may_be_none: bool
) -> str:
    """Return the answer to a question as Devlin et al. 2019 define it, empty for none.

    Args:
        tokenizer: The tokenizer.
        asked: The question and its context.
        logits: The logits [2, SEQ] of the windows of this question, and of those after it.
        may_be_none: Whether a question may have no answer.
    """
    context = asked["context"]
    offsets = tokenizer.encode_with_offsets([context])[0][1]
    before = 1 + len(tokenizer.encode(asked["question"])) + 1  # [CLS] question [SEP]
    room = SEQ - before - 1
    firsts = [0]
    while firsts[-1] + room < len(offsets):
        firsts.append(firsts[-1] + STRIDE)
    windows = [range(first, min(first + room, len(offsets))) for first in firsts]

    def has_most_context(token: int) -> range:
        def n_tokens(window: range) -> float:
            sides = min(token - window.start, window.stop - 1 - token)
            return sides + 0.01 * len(window)

        return max((window for window in windows if token in window), key=n_tokens)

    spans, nulls = [], []
    for window in windows:
        begins, ends = next(logits)
        nulls.append(float(begins[0] + ends[0]))
        at = before - window.start
        spans += [
            (float(begins[at + i] + ends[at + j]), i, j)
            for i in window
            if has_most_context(i) is window
            for j in window
            if i <= j < i + LONGEST
        ]
    score, first, last = max(spans)
    if may_be_none and min(nulls) > score:
        return ""
    return str(context[offsets[first][0] : offsets[last][1]].strip())


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("name", ["squad", "squad2"])
def test_answers_are_those_of_a_search_over_all_windows(
    tmp_path: Path, name: str, split: str
) -> None:
    folder = examples(name, tmp_path)
    tokenizer, version = folder.tokenizer, "v2.0" if name == "squad2" else "v1.1"
    file = tmp_path / name / f"{'train' if split == 'train' else 'dev'}-{version}.json"
    (article,) = json.loads(file.read_text(encoding="utf-8"))["data"]
    asked = [
        {"context": one["context"], **question}
        for one in article["paragraphs"]
        for question in one["qas"]
    ]
    opened = folder.train if split == "train" else folder.val
    special = SpecialIds.of("bert", "answer", tokenizer, 0)
    samples = AnswerExamples(opened, SEQ, special, STRIDE, evaluating=True)
    draw = np.random.default_rng(0)
    context = np.stack([samples.sample(i, draw)["context"] for i in range(samples.n_samples)])
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(context), 2, SEQ, generator=generator, dtype=torch.float64)
    logits[:, :, 0] += 3.5  # so that about half of the questions have no answer

    read = iter(logits)
    want = [searched(tokenizer, one, read, name == "squad2") for one in asked]
    assert next(read, None) is None, "there are as many windows as samples"
    scorer = AnswerSpans(samples, folder, split)
    found = best_spans(logits, torch.from_numpy(context), LONGEST)
    assert scorer.said(found) == want
    if name == "squad2":
        assert 0.3 < want.count("") / len(want) < 0.7
    assert len({*want}) > len(want) / 3, "the answers differ"
    right = [[one["text"] for one in question["answers"]] for question in asked]
    assert scorer.scores(found) == answer_scores(want, right)
