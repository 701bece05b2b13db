"""Scorers of the fine-tuning tasks: what to keep of every sample, and the scores of a set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from gridformer.config import RunConfig
from gridformer.data import Batches, RunData, open_validation
from gridformer.data.examples_file import Question, read_questions
from gridformer.data.samples.batches import SequentialBatches, open_tests
from gridformer.data.samples.examples import AnswerExamples
from gridformer.data.samples.sample import Samples
from gridformer.data.tokenfolder import TokenFolder, TokenSplit
from gridformer.data.tokenizer import Tokenizer
from gridformer.models import Model
from gridformer.models.blocks import by_label
from gridformer.train.evaluation import Scorer, ValidationSet
from gridformer.train.task_scores import answer_scores, label_scores, regression_scores
from gridformer.utils.batch import Batch


def validation_sets(run: RunConfig, data: RunData) -> list[ValidationSet]:
    """Returns the validation and test sets of a run, with their scorers.

    Raises:
        DataError: A set contains no sample.
    """
    return [
        *_sets(run, data, open_validation(run, data), data.validation, "val"),
        *_sets(run, data, open_tests(run, data), data.test, "test"),
    ]


def _sets(
    run: RunConfig,
    data: RunData,
    opened: Mapping[str, Batches],
    splits: Mapping[str, TokenSplit],
    kind: Literal["val", "test"],
) -> list[ValidationSet]:
    found = []
    for name, batches in opened.items():
        numbers, scorer = range(run.train.eval_batches), None
        if isinstance(batches, SequentialBatches):
            numbers = batches.numbers
            scorer = scorer_of(run, data.folder_of(splits[name]), splits[name], batches.samples)
        found.append(ValidationSet(name, batches, numbers, scorer, kind))
    return found


def scorer_of(
    run: RunConfig, folder: TokenFolder, split: TokenSplit, samples: Samples
) -> Scorer | None:
    """Returns the scorer of a validation set, or None if its task has no right answers.

    Args:
        run: The run.
        folder: The folder of the set.
        split: The split that the set consists of.
        samples: The samples of the set.
    """
    if run.task in ("classify", "choice"):
        n_labels = run.data.n_choices if run.task == "choice" else run.model.n_labels
        return LabelScorer(samples.n_samples, n_labels)
    if run.task == "regression":
        return NumberScorer(samples.n_samples)
    if run.task == "answer":
        assert isinstance(samples, AnswerExamples)
        return AnswerScorer(samples, folder, split.name, run.data.max_answer_len)
    return None


@dataclass(frozen=True)
class LabelScorer:
    """Scores labels, from the predicted and the right label of each sample."""

    n_samples: int
    n_labels: int
    n_columns: int = 2

    def answers(self, model: Model, hidden_BSH: Tensor, batch: Batch) -> Tensor | None:
        """See Scorer."""
        logits = model.branch_logits(hidden_BSH, batch)["labels"]
        if logits.is_meta:
            return None
        found = by_label(logits, batch["labels"]).argmax(-1)
        return torch.stack((found, batch["labels"]), 1)

    def scores(self, found: Tensor) -> dict[str, float]:
        """See Scorer."""
        said, wanted = found.long().t().tolist()
        return label_scores(said, wanted, self.n_labels)


@dataclass(frozen=True)
class NumberScorer:
    """Scores numbers, from the predicted and the right number of each sample."""

    n_samples: int
    n_columns: int = 2

    def answers(self, model: Model, hidden_BSH: Tensor, batch: Batch) -> Tensor | None:
        """See Scorer."""
        logits = model.branch_logits(hidden_BSH, batch)["labels"]
        if logits.is_meta:
            return None
        return torch.stack((logits.squeeze(1).double(), batch["labels"].double()), 1)

    def scores(self, found: Tensor) -> dict[str, float]:
        """See Scorer."""
        said, wanted = found.t().tolist()
        return regression_scores(said, wanted)


@dataclass(frozen=True)
class AnswerScorer:
    """Scores answers to questions, from the best span of each window and the score of no answer.

    The answer to a question is the span with the largest sum of both logits in any window, of at
    most `max_length` tokens. If the set has questions without an answer, the result is no answer
    where the smallest sum of the logits of [CLS] in any window is larger than that.

    Attributes:
        samples: The windows.
        folder: The folder.
        split: The name of its split.
        max_length: The most tokens of an answer.
    """

    samples: AnswerExamples
    folder: TokenFolder
    split: str
    max_length: int
    n_columns: int = 4

    @property
    def n_samples(self) -> int:
        return self.samples.n_samples

    def answers(self, model: Model, hidden_BSH: Tensor, batch: Batch) -> Tensor | None:
        """Returns the sum of logits of the best span, its first and last token, and [CLS]'s sum."""
        logits = model.branch_logits(hidden_BSH, batch)["answer"]
        if logits.is_meta:
            return None
        return best_spans(logits, batch["context"], self.max_length)

    def scores(self, found: Tensor) -> dict[str, float]:
        """See Scorer."""
        return answer_scores(self.said(found), [one.answers for one in self.questions])

    def said(self, found: Tensor) -> list[str]:
        """Returns the answer to each question of the set, empty for none."""
        may_be_none = any(not one.answers for one in self.questions)
        best: dict[int, tuple[float, int, int]] = {}
        none: dict[int, float] = {}
        for number, (score, low, high, null) in enumerate(found.tolist()):
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
        return [offsets for _, offsets in offsets_of(self.folder.tokenizer, contexts)]


def offsets_of(
    tokenizer: Tokenizer, texts: Sequence[str]
) -> list[tuple[list[int], Sequence[tuple[int, int]]]]:
    """Returns the ids of texts and the characters of each token; equal texts are encoded once."""
    once = [*dict.fromkeys(texts)]
    found = dict(zip(once, tokenizer.encode_with_offsets(once)))
    return [found[text] for text in texts]


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
