"""Scores of classification and question answering, by the definitions of GLUE and SQuAD.

Wang et al. 2019 (GLUE): accuracy, the F1 score of class 1, the Matthews correlation, and the
correlations of Pearson and Spearman. Rajpurkar et al. 2016 and 2018 (SQuAD 1.1 and 2.0): exact
match, and the F1 score of the words of an answer.
All scores are fractions; papers often multiply them by 100.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def label_scores(found: Sequence[int], wanted: Sequence[int], n_labels: int) -> dict[str, float]:
    """Returns the accuracy of labels, and for two labels also F1 of label 1 and Matthews' score.

    Args:
        found: The label that a model gives to each sample.
        wanted: The right label of each sample.
        n_labels: How many labels there are.
    """
    pairs = Counter(zip(found, wanted))
    right = sum(n for (a, b), n in pairs.items() if a == b)
    scores = {"accuracy": right / max(1, len(wanted))}
    if n_labels == 2:
        both, only_found = pairs[1, 1], pairs[1, 0]
        only_wanted, neither = pairs[0, 1], pairs[0, 0]
        scores["f1"] = _ratio(2 * both, 2 * both + only_found + only_wanted)
        sizes = (both + only_found, both + only_wanted, neither + only_found, neither + only_wanted)
        top = both * neither - only_found * only_wanted
        scores["matthews"] = _ratio(top, math.sqrt(math.prod(sizes)))
    return scores


def regression_scores(found: Sequence[float], wanted: Sequence[float]) -> dict[str, float]:
    """Returns the correlations of numbers with the right ones: Pearson's, and Spearman's of ranks.

    They are 0 if all numbers of one side are equal.

    Args:
        found: The number that a model gives to each sample.
        wanted: The right number of each sample.
    """
    x, y = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return {"pearson": _correlation(x, y), "spearman": _correlation(_ranks(x), _ranks(y))}


def _correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    x, y = x - x.mean(), y - y.mean()
    return _ratio(float(x @ y), math.sqrt(float(x @ x) * float(y @ y)))


def _ranks(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the rank of each number; equal numbers have the mean of their ranks."""
    _, group, sizes = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(sizes) - (sizes - 1) / 2)[group]


def answer_scores(said: Sequence[str], wanted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Returns exact_match and f1 of answers, and both for questions with and without an answer.

    Of several right answers the best match counts.

    Args:
        said: The answer to each question, empty for none.
        wanted: The right answers to each question; none if there is no answer.
    """
    each = [
        (
            max(float(normalized(text) == normalized(one)) for one in right),
            max(word_f1(text, one) for one in right),
            bool(answers),
        )
        for text, answers in zip(said, wanted)
        for right in [_real(answers)]
    ]
    scores = _means(each, "")
    parts = [(f"_{what}", [one for one in each if one[2] is has]) for what, has in _KINDS]
    if all(some for _, some in parts):
        for suffix, some in parts:
            scores |= _means(some, suffix)
    return scores


_KINDS = (("has_answer", True), ("no_answer", False))


def normalized(answer: str) -> str:
    """Returns an answer in lower case, without punctuation, articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def word_f1(said: str, wanted: str) -> float:
    """Returns the F1 score of the words of an answer; without words, 1 if both have none."""
    ours, theirs = normalized(said).split(), normalized(wanted).split()
    if not ours or not theirs:
        return float(ours == theirs)
    same = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * same / (len(ours) + len(theirs))


def _real(answers: Sequence[str]) -> Sequence[str]:
    """Leaves out right answers that consist of articles and punctuation alone."""
    return [one for one in answers if normalized(one)] or [""]


def _means(each: Sequence[tuple[float, float, bool]], suffix: str) -> dict[str, float]:
    n = max(1, len(each))
    return {
        f"exact_match{suffix}": sum(match for match, _, _ in each) / n,
        f"f1{suffix}": sum(f1 for _, f1, _ in each) / n,
    }


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0
