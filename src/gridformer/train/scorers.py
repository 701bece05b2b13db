"""Scorers of the fine-tuning tasks: what to keep of every sample, and the scores of a set.

The scores follow GLUE (Wang et al. 2019: accuracy, the F1 score of class 1, the Matthews
correlation, the correlations of Pearson and Spearman) and SQuAD 1.1 and 2.0 (Rajpurkar et al.
2016 and 2018: exact match, the F1 score of the words of an answer). All are fractions; papers often
multiply them by 100.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gridformer.config import RunConfig
from gridformer.data.samples.examples import AnswerExamples
from gridformer.data.samples.sample import Samples
from gridformer.data.side_texts import Question, read_questions
from gridformer.data.tokenfolder import TokenFolder, TokenSplit
from gridformer.models import Model
from gridformer.models.blocks import by_label
from gridformer.utils.batch import Batch

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Scorer:
    """Scores the answers that a model gives to the samples of a validation set.

    `answers` keeps some numbers of each sample, and `scores` needs those of all samples.
    """

    n_samples: int  # of the set
    n_columns: int  # how many numbers are kept of each sample
    head: str  # the branch of the model that answers
    # Maps its logits and the micro-batch to the numbers [b, n_columns]
    keep: Callable[[Tensor, Batch], Tensor]
    # Maps the numbers [n_samples, n_columns] in float64 to scores by name, such as `accuracy`
    scores: Callable[[Tensor], dict[str, float]]

    def answers(self, model: Model, hidden_BSH: Tensor, batch: Batch) -> Tensor | None:
        """Returns the numbers of a micro-batch; None if another process computes them.

        Args:
            model: This rank's part of the model.
            hidden_BSH: The last hidden states, sharded as they are between sections.
            batch: The micro-batch, whose key `item` numbers its samples.
        """
        logits = model.branch_logits(hidden_BSH, batch)[self.head]
        return None if logits.is_meta else self.keep(logits, batch)


def scorer_of(
    run: RunConfig, folder: TokenFolder, split: TokenSplit, samples: Samples
) -> Scorer | None:
    """Returns the scorer of a validation set, or None if its task has no right answers."""
    n = samples.n_samples
    if run.task in ("classify", "choice"):
        n_labels = run.data.n_choices if run.task == "choice" else run.model.n_labels
        return Scorer(n, 2, "labels", _labels, partial(label_scores, n_labels=n_labels))
    if run.task == "regression":
        return Scorer(n, 2, "labels", _numbers, regression_scores)
    if run.task == "answer":
        assert isinstance(samples, AnswerExamples)
        longest = run.data.max_answer_len
        spans = AnswerSpans(samples, folder, split.name)

        def keep(logits: Tensor, batch: Batch) -> Tensor:
            return best_spans(logits, batch["context"], longest)

        return Scorer(n, 4, "answer", keep, spans.scores)
    return None


def _labels(logits: Tensor, batch: Batch) -> Tensor:
    """Returns the predicted and the right label of each sample."""
    labels = by_label(logits, batch["labels"]).argmax(-1)
    return torch.stack((labels, batch["labels"]), 1)


def _numbers(logits: Tensor, batch: Batch) -> Tensor:
    """Returns the predicted and the right number of each sample."""
    return torch.stack((logits.squeeze(1).double(), batch["labels"].double()), 1)


@dataclass(frozen=True)
class AnswerSpans:
    """Finds the answers to the questions of a set, from the `best_spans` of each window.

    The answer to a question is the span with the largest sum of both logits in any window. If the
    set has questions without an answer, the result is no answer where the smallest sum of the
    logits of [CLS] in any window is larger than that.
    """

    samples: AnswerExamples
    folder: TokenFolder
    split: str

    def scores(self, answers: Tensor) -> dict[str, float]:
        return answer_scores(self.said(answers), [one.answers for one in self.questions])

    def said(self, answers: Tensor) -> list[str]:
        """Returns the answer to each question of the set, empty for none."""
        may_be_none = any(not one.answers for one in self.questions)
        best: dict[int, tuple[float, int, int]] = {}
        none: dict[int, float] = {}
        for number, (score, low, high, null) in enumerate(answers.tolist()):
            window = self.samples.window(number)
            none[window.document] = min(null, none.get(window.document, null))
            before = best.get(window.document, (-torch.inf, 0, 0))
            if score > before[0]:
                moved = window.start - window.place
                best[window.document] = (score, int(low) + moved, int(high) + moved)
        said = []
        for number, question in enumerate(self.questions):
            score, low, high = best.get(number, (-torch.inf, 0, 0))
            if score == -torch.inf or (may_be_none and none[number] > score):
                said.append("")
                continue
            offsets = self.offsets[number]
            said.append(question.context[offsets[low][0] : offsets[high][1]].strip())
        return said

    @cached_property
    def questions(self) -> list[Question]:
        """The questions of the set, with their contexts as text."""
        return read_questions(self.folder.path, self.split)

    @cached_property
    def offsets(self) -> list[Sequence[tuple[int, int]]]:
        """The characters of the context that each of its tokens covers, by question."""
        contexts = [one.context for one in self.questions]
        different = [*dict.fromkeys(contexts)]
        encoded = dict(zip(different, self.folder.tokenizer.encode_with_offsets(different)))
        return [encoded[context][1] for context in contexts]


def best_spans(logits_B2S: Tensor, context_BS: Tensor, max_length: int) -> Tensor:
    """Returns each sequence's best span: its score, its two ends, and the score of no answer.

    Args:
        logits_B2S: The logits that an answer begins and ends at each token.
        context_BS: What an answer may do at each token [b, s]: 0 nothing, 1 end only, 2 begin and
            end.
        max_length: The most tokens of a span.

    Returns:
        [b, 4] in float64: the sum of two logits, -inf if there is no span; two positions; and the
        sum of the logits of the first token, which stands for no answer.
    """
    starts, ends = logits_B2S.double().unbind(1)
    starts = starts.masked_fill(context_BS < 2, -torch.inf)
    ends_in = ends.masked_fill(context_BS < 1, -torch.inf)
    s = starts.shape[1]
    best, low, length = starts[:, 0] - torch.inf, context_BS[:, 0] * 0, context_BS[:, 0] * 0
    for more in range(min(max_length, s)):
        score, place = (starts[:, : s - more] + ends_in[:, more:]).max(1)
        better = score > best
        best = torch.where(better, score, best)
        low = torch.where(better, place, low)
        length = torch.where(better, more, length)
    null = logits_B2S[:, 0, 0].double() + logits_B2S[:, 1, 0].double()
    return torch.stack((best, low.double(), (low + length).double(), null), 1)


# --------------------------------------------------------------------------- scores


def label_scores(answers: Tensor, n_labels: int) -> dict[str, float]:
    """Returns the accuracy of labels, and for two labels also F1 of label 1 and Matthews' score.

    Args:
        answers: The predicted and the right label of each sample.
        n_labels: How many labels there are.
    """
    pairs = Counter(map(tuple, answers.long().tolist()))
    right = sum(n for (a, b), n in pairs.items() if a == b)
    scores = {"accuracy": right / max(1, len(answers))}
    if n_labels == 2:
        both, only_said = pairs[1, 1], pairs[1, 0]
        only_wanted, neither = pairs[0, 1], pairs[0, 0]
        scores["f1"] = _ratio(2 * both, 2 * both + only_said + only_wanted)
        sizes = (both + only_said, both + only_wanted, neither + only_said, neither + only_wanted)
        top = both * neither - only_said * only_wanted
        scores["matthews"] = _ratio(top, math.sqrt(math.prod(sizes)))
    return scores


def regression_scores(answers: Tensor) -> dict[str, float]:
    """Returns the correlations of numbers with the right ones: Pearson's, and Spearman's of ranks.

    They are 0 if all numbers of one side are equal.
    """
    x, y = np.ascontiguousarray(answers.double().numpy().T)
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
    groups: dict[str, list[tuple[float, float]]] = {"": [], "_has_answer": [], "_no_answer": []}
    for text, answers in zip(said, wanted):
        # Without right answers that consist of articles and punctuation alone.
        right = [one for one in answers if normalized(one)] or [""]
        match = max(float(normalized(text) == normalized(one)) for one in right)
        f1 = max(word_f1(text, one) for one in right)
        for suffix in ("", "_has_answer" if answers else "_no_answer"):
            groups[suffix].append((match, f1))
    scores = {}
    for suffix, pairs in groups.items() if all(groups.values()) else [("", groups[""])]:
        n = max(1, len(pairs))
        scores[f"exact_match{suffix}"] = sum(match for match, _ in pairs) / n
        scores[f"f1{suffix}"] = sum(f1 for _, f1 in pairs) / n
    return scores


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


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0
