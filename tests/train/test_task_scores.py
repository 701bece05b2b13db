"""Scores of fine-tuning against examples worked out by hand, and published definitions."""

from __future__ import annotations

import math

import pytest
import torch

from gridformer.train.scorers import (
    answer_scores,
    best_spans,
    label_scores,
    normalized,
    regression_scores,
    word_f1,
)


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
