"""Forward and backward passes over the micro-batches of a step, without or with a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from gridformer.models import Model
from gridformer.parallel.data.gradients import GradientSums
from gridformer.parallel.pipeline import AtBorder, Executor, OnAction, timed
from gridformer.train.ending import StepDropped
from gridformer.utils.batch import Batch, MicroBatch

Losses = dict[str, Tensor]
# Called with the last hidden states of a micro-batch, and the micro-batch.
Finish = Callable[[Tensor, Batch], None]


class Passes(Protocol):
    """Runs the micro-batches of a step through this process's part of a model.

    `train` and `evaluate` return this process's sum of each loss in float64, which is 0 if other
    processes compute the loss.

    Attributes:
        on_action: Called with each pass and each message between stages, and their times.
        at_border: Called in training before each micro-batch but the first, with its number; True
            means that this micro-batch and all later ones are left out, on all ranks.
    """

    on_action: OnAction | None
    at_border: AtBorder | None

    def train(
        self, work: Sequence[MicroBatch], counts: Mapping[str, Tensor], scale: float = 1.0
    ) -> Losses:
        """Accumulates the gradients of scale * the sum over losses of (sum / count).

        Args:
            work: This process's micro-batches.
            counts: How many targets each loss has in the global batch.
            scale: The loss scale.

        Raises:
            StepDropped: Micro-batches were left out. No gradient was summed over replicas, and no
                parameter was updated.
        """

    def forward(self, work: Sequence[MicroBatch], finish: Finish) -> None:
        """Runs forward passes, and calls `finish(hidden states, batch)` where the last link runs.

        Call it without gradients.
        """

    def evaluate(self, work: Sequence[MicroBatch], also: Finish | None = None) -> Losses:
        """Computes the losses without gradients, and calls `also` as `forward` calls `finish`."""

    def loads_again(self) -> None:
        """Notes that hooks of modules are going to launch kernels of their own.

        All ranks call it together; see `gridformer.parallel.pipeline.Executor.loads`.
        """


class WholeModel:
    """Runs one micro-batch after the other through the whole model.

    Args:
        model: This rank's model.
        sums: Sums gradients over replicas, beginning in the last micro-batch's backward pass.

    Attributes:
        follows: The micro-batches of a step that run; None for all. A record of a step has few.
    """

    def __init__(self, model: Model, sums: GradientSums) -> None:
        self.model, self.sums = model, sums
        self.on_action: OnAction | None = None
        self.at_border: AtBorder | None = None
        self.follows: Sequence[int] | None = None

    def train(
        self, work: Sequence[MicroBatch], counts: Mapping[str, Tensor], scale: float = 1.0
    ) -> Losses:
        """Runs the micro-batches forward and backward; see `Passes.train`.

        Raises:
            StepDropped: Micro-batches were left out, on all ranks.
        """
        totals = zeros(counts)
        for number in self.follows or range(len(work)):
            micro = work[number]
            if number and self.at_border and self.at_border(number):
                raise StepDropped
            self.model.clock.at(micro.rows)
            with self._timed("forward", number):
                losses = self.model.losses(micro.batch)
            last = number == len(work) - 1
            summing = self.sums.last_backward() if last else nullcontext()
            with self._timed("backward", number), summing:
                weighted(losses, counts, scale).backward()
            add(totals, losses)
        return totals

    def forward(self, work: Sequence[MicroBatch], finish: Finish) -> None:
        for number in self.follows or range(len(work)):
            batch = work[number].batch
            with self._timed("forward", number):
                finish(self.model.hidden(batch), batch)

    def evaluate(self, work: Sequence[MicroBatch], also: Finish | None = None) -> Losses:
        return evaluated(self, work, also)

    def loads_again(self) -> None:
        """Does nothing: no message waits between its passes."""

    def _timed(self, kind: str, micro: int) -> AbstractContextManager[None]:
        return timed(self.on_action, kind, 0, micro, torch.cuda.is_initialized())


class Pipeline:
    """Runs micro-batches through the pipeline stages that this process holds.

    The last stage computes the losses; the sums of other ranks stay 0.
    """

    def __init__(self, model: Model, executor: Executor) -> None:
        self.model, self.executor = model, executor

    @property
    def on_action(self) -> OnAction | None:
        return self.executor.on_action

    @on_action.setter
    def on_action(self, told: OnAction | None) -> None:
        self.executor.on_action = told

    @property
    def at_border(self) -> AtBorder | None:
        return self.executor.at_border

    @at_border.setter
    def at_border(self, told: AtBorder | None) -> None:
        self.executor.at_border = told

    def train(
        self, work: Sequence[MicroBatch], counts: Mapping[str, Tensor], scale: float = 1.0
    ) -> Losses:
        """Runs the micro-batches forward and backward; see `Passes.train`.

        Raises:
            StepDropped: Micro-batches were left out, on all ranks.
        """
        totals = zeros(counts)

        def finish(hidden: Tensor, batch: Batch) -> Tensor:
            losses = self.model.losses_of(hidden, batch)
            add(totals, losses)
            return weighted(losses, counts, scale)

        self.executor.train(work, finish)
        if self.executor.dropped:
            raise StepDropped
        return totals

    def forward(self, work: Sequence[MicroBatch], finish: Finish) -> None:
        self.executor.evaluate(work, finish)

    def evaluate(self, work: Sequence[MicroBatch], also: Finish | None = None) -> Losses:
        return evaluated(self, work, also)

    def loads_again(self) -> None:
        self.executor.loads_again()


def evaluated(
    passes: WholeModel | Pipeline, work: Sequence[MicroBatch], also: Finish | None = None
) -> Losses:
    """Returns `Passes.evaluate`: the sum of each loss over micro-batches.

    Args:
        passes: Runs the micro-batches.
        work: This process's micro-batches.
        also: Called with the last hidden states of a micro-batch and the micro-batch.
    """
    totals = zeros(Model.counts(work[0].batch))

    def finish(hidden: Tensor, batch: Batch) -> None:
        add(totals, passes.model.losses_of(hidden, batch))
        if also is not None:
            also(hidden, batch)

    passes.forward(work, finish)
    return totals


def weighted(losses: Losses, counts: Mapping[str, Tensor], scale: float) -> Tensor:
    """Returns scale * the sum of the mean losses, which is what training minimizes.

    Args:
        losses: The sum of each loss over the targets of a micro-batch.
        counts: How many targets each loss has in the global batch; 0 counts as 1.
        scale: The loss scale.
    """
    # D&SP-cSub puts a loss that another device computes on the meta device; its count must follow.
    parts = [loss / counts[name].clamp(min=1).to(loss) for name, loss in losses.items()]
    total: Tensor = parts[0]
    for part in parts[1:]:
        total = total + part
    return total * scale


def zeros(counts: Mapping[str, Tensor]) -> Losses:
    """Returns a zero in float64 for each loss, on the device of its count."""
    return {
        name: torch.zeros((), dtype=torch.float64, device=count.device)
        for name, count in counts.items()
    }


def add(totals: Losses, losses: Losses) -> None:
    """Adds losses to totals in place."""
    for name, loss in losses.items():
        if not loss.is_meta:  # another device computes it (D&SP-cSub)
            totals[name] += loss.detach()
