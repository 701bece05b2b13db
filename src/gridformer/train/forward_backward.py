"""Forward and backward over the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from gridformer.models import Model
from gridformer.parallel.data.gradients import GradientSums
from gridformer.parallel.pipeline import Executor, OnAction, timed
from gridformer.utils.batch import Batch, MicroBatch

Losses = dict[str, Tensor]


class Passes(Protocol):
    """How a step's micro-batches go through what this process holds of a model.

    Both return this process's sums of each loss, in float64; 0 where others compute it.
    on_action: told of each pass, of messages between stages, and when they were.
    """

    on_action: OnAction | None

    def train(
        self, work: Sequence[MicroBatch], counts: Mapping[str, Tensor], scale: float = 1.0
    ) -> Losses:
        """Accumulate the gradients of scale * the sum over all losses of (its sum / its count)."""

    def evaluate(self, work: Sequence[MicroBatch]) -> Losses:
        """Without gradients."""


class WholeModel:
    """One micro-batch after the other through all of the model.

    sums: of gradients over replicas; they start during the last micro-batch's backward pass.
    on_action: told of each pass, as by `gridformer.parallel.pipeline.Executor`.
    """

    def __init__(self, model: Model, sums: GradientSums) -> None:
        self.model, self.sums = model, sums
        self.on_action: OnAction | None = None

    def train(
        self, work: Sequence[MicroBatch], counts: Mapping[str, Tensor], scale: float = 1.0
    ) -> Losses:
        totals = zeros(counts)
        for number, micro in enumerate(work):
            self.model.clock.at(micro.rows)
            with self._timed("forward", number):
                losses = self.model.losses(micro.batch)
            last = number == len(work) - 1
            summing = self.sums.last_backward() if last else nullcontext()
            with self._timed("backward", number), summing:
                weighted(losses, counts, scale).backward()
            add(totals, losses)
        return totals

    def evaluate(self, work: Sequence[MicroBatch]) -> Losses:
        totals: Losses = {}
        for micro in work:
            losses = self.model.losses(micro.batch)
            totals = totals or zeros(Model.counts(micro.batch))
            add(totals, losses)
        return totals

    def _timed(self, kind: str, micro: int) -> AbstractContextManager[None]:
        return timed(self.on_action, kind, 0, micro, torch.cuda.is_initialized())


class Pipeline:
    """Micro-batches through the stages of a pipeline, of which this process holds some.

    The last stage has the losses; the other ranks' sums stay 0.
    """

    def __init__(self, model: Model, executor: Executor) -> None:
        self.model, self.executor = model, executor

    @property
    def on_action(self) -> OnAction | None:
        return self.executor.on_action

    @on_action.setter
    def on_action(self, told: OnAction | None) -> None:
        self.executor.on_action = told

    def train(
        self, work: Sequence[MicroBatch], counts: Mapping[str, Tensor], scale: float = 1.0
    ) -> Losses:
        totals = zeros(counts)

        def finish(hidden: Tensor, batch: Batch) -> Tensor:
            losses = self.model.losses_of(hidden, batch)
            add(totals, losses)
            return weighted(losses, counts, scale)

        self.executor.train(work, finish)
        return totals

    def evaluate(self, work: Sequence[MicroBatch]) -> Losses:
        totals = zeros(Model.counts(work[0].batch))

        def finish(hidden: Tensor, batch: Batch) -> None:
            add(totals, self.model.losses_of(hidden, batch))

        self.executor.evaluate(work, finish)
        return totals


def weighted(losses: Losses, counts: Mapping[str, Tensor], scale: float) -> Tensor:
    """The loss that is minimized: of each kind the mean over its targets, added up; scaled."""
    # A loss that is computed elsewhere (D&SP-cSub) is on the meta device: so its count goes there.
    parts = [loss / counts[name].clamp(min=1).to(loss) for name, loss in losses.items()]
    total: Tensor = parts[0]
    for part in parts[1:]:
        total = total + part
    return total * scale


def zeros(counts: Mapping[str, Tensor]) -> Losses:
    """A sum for each loss, where its count is."""
    return {
        name: torch.zeros((), dtype=torch.float64, device=count.device)
        for name, count in counts.items()
    }


def add(totals: Losses, losses: Losses) -> None:
    """A loss that is computed elsewhere (D&SP-cSub) has no value here: nothing to add."""
    for name, loss in losses.items():
        if not loss.is_meta:
            totals[name] += loss.detach()
