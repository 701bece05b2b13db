"""Evaluations during training: losses and scores of validation sets, and further measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gridformer import comm
from gridformer.config import RunConfig
from gridformer.data import Batches, RunData, open_validation
from gridformer.data.samples.batches import SequentialBatches
from gridformer.data.samples.order import Rows
from gridformer.data.tokenfolder import TokenSplit
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel.data.copies import assert_copies_equal
from gridformer.train.in_flight_steps import Evaluation
from gridformer.train.loader import BatchLoader
from gridformer.train.scorers import Scorer, scorer_of
from gridformer.train.step import Stepper
from gridformer.train.stop_protocol import StepDropped, StopProtocol
from gridformer.utils.batch import Batch

LABEL = "scores"


# Measures numbers that take more than a forward pass, such as BLEU of generated texts, after some
# steps of training, by their keys in metrics.jsonl. All ranks call it together and get the same
# numbers. The model of the stepper is in no particular mode.
Measure = Callable[[Stepper, int], Mapping[str, float]]


@dataclass(frozen=True)
class ValidationSet:
    """One set that an evaluation reads."""

    name: str  # its name in metrics, `val_loss_NAME`; empty for the only set of a run
    batches: Batches  # its global batches
    numbers: range  # which of them an evaluation reads
    # Scores its samples, if they have right answers; then the batches hold each sample once
    scorer: Scorer | None = None
    # The prefix of its metrics. A `test` set is read after the last step only.
    kind: Literal["val", "test"] = "val"


def validation_sets(run: RunConfig, data: RunData) -> list[ValidationSet]:
    """Returns the validation and test sets of a run, with their scorers.

    Raises:
        DataError: A set contains no sample.
    """
    kinds: list[tuple[Literal["val", "test"], Mapping[str, TokenSplit]]]
    kinds = [("val", data.validation), ("test", data.test)]
    sets = []
    for kind, splits in kinds:
        for name, batches in open_validation(run, data, splits).items():
            numbers, scorer = range(run.train.eval_batches), None
            if isinstance(batches, SequentialBatches):
                numbers, split = batches.numbers, splits[name]
                scorer = scorer_of(run, data.folder_of(split), split, batches.samples)
            sets.append(ValidationSet(name, batches, numbers, scorer, kind))
    return sets


class Evaluator:
    """Evaluates a model during training. All ranks call it together and get the same numbers."""

    def __init__(
        self,
        stepper: Stepper,
        sets: Sequence[ValidationSet],
        device: torch.device,
        measures: Sequence[Measure] = (),
        check_copies: bool = False,
    ) -> None:
        self.stepper, self.sets, self.device = stepper, sets, device
        self.measures, self.check_copies = measures, check_copies

    def __call__(self, step: int, stopping: StopProtocol, last: bool = False) -> dict[str, float]:
        """Returns `val_loss`, its parts, losses of named sets, scores and measures.

        The loss of several validation sets is the mean of their losses.

        Test sets are read only if it is the last evaluation of the run.

        Raises:
            StepDropped: The run stops inside the evaluation.
        """
        if self.check_copies:
            assert_copies_equal(self.stepper.model, self.stepper.axes)
        sets = [each for each in self.sets if last or each.kind == "val"]
        if stopping.begins("evaluation", sum(len(each.numbers) for each in sets)):
            raise StepDropped
        metrics: dict[str, float] = {}
        losses = []
        n_before = 0  # the number of batches of earlier sets
        for each in sets:
            answers = None
            if each.scorer is not None:
                answers = Answers(each.scorer, self.stepper.model, self.stepper.axes, self.device)
            result = self._losses(each, stopping, n_before, answers)
            n_before += len(each.numbers)
            if each.kind == "val":
                losses.append(result.loss)
            suffix = f"_{each.name}" if each.name else ""
            metrics[f"{each.kind}_loss{suffix}"] = result.loss
            for part, value in result.losses.items() if len(result.losses) > 1 else ():
                metrics[f"{each.kind}_loss_{part}{suffix}"] = value
            if answers is not None:
                for name, value in answers.scores().items():
                    metrics[f"{each.kind}_{name}{suffix}"] = value
        for measure in self.measures:
            metrics |= measure(self.stepper, step)
        stopping.ended()
        return {"val_loss": sum(losses) / len(losses), **metrics}

    def _losses(
        self, one: ValidationSet, stopping: StopProtocol, n_before: int, answers: Answers | None
    ) -> Evaluation:
        rows = self.stepper.split.all_rows
        with BatchLoader(one.batches, rows, one.numbers, self.device) as ahead:

            def read(number: int, rows: Rows) -> Batch:
                n_read = n_before + number - one.numbers.start
                if n_read and stopping.stops_before(n_read):
                    raise StepDropped
                return ahead.read(number, rows)

            return self.stepper.evaluate([partial(read, number) for number in one.numbers], answers)


class Answers:
    """Collects what a scorer needs of every sample, from all ranks."""

    def __init__(self, scorer: Scorer, model: Model, axes: Axes, device: torch.device) -> None:
        self.scorer, self.model, self.axes = scorer, model, axes
        # One more row, for the rows that pad the last batch.
        shape = (scorer.n_samples + 1, scorer.n_columns)
        self.answers = torch.zeros(shape, dtype=torch.float64, device=device)
        # Ranks that hold the same rows have the same answers, and one of them contributes them.
        self.speaks = axes.same_batch.index == 0

    def __call__(self, hidden_BSH: Tensor, batch: Batch) -> None:
        """Keeps the answers to the samples of a micro-batch, where its last link has run."""
        values = self.scorer.answers(self.model, hidden_BSH, batch)
        if values is not None and self.speaks:
            self.answers[batch["item"]] = values.double()

    def scores(self) -> dict[str, float]:
        """Returns the scores of the answers to all samples, on every rank."""
        whole = self.answers[:-1].contiguous()
        return self.scorer.scores(comm.all_reduce(whole, self.axes.world, label=LABEL).cpu())
