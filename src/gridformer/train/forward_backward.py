"""Forward and backward passes over the micro-batches of a step, without or with a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gridformer import comm
from gridformer.data.samples.order import Rows
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.models.blocks import IGNORE, SequenceRows
from gridformer.parallel.data.gradients import GradientSums
from gridformer.parallel.pipeline import Executor, OnAction, StopsBefore, timed
from gridformer.parallel.tensor.summa import gathered_weights_scope
from gridformer.train.in_flight_steps import Evaluation
from gridformer.train.stop_protocol import StepDropped
from gridformer.utils.batch import Batch, MicroBatch

Losses = dict[str, Tensor]
# Called with the last hidden states of a micro-batch, and the micro-batch.
Finish = Callable[[Tensor, Batch], None]
# Reads rows of a step's global batch; see gridformer.utils.batch.
ReadRows = Callable[[Rows], Batch]
# The keys of a batch whose tensors have an entry for every token that a device has, those of
# targets of sequences, and those with an entry for every sequence of a sample.
_OF_TOKENS = ("tokens", "targets", "positions", "segments", "source", "source_positions")
_COUNTED = ("pair", "labels", "answer")
_OF_SEQUENCES = ("tokens", "valid", "segments", "source", "source_valid", "at")


class RowSplit:
    """The rows of a global batch that this device reads.

    A global batch of B sequences is split into dp contiguous parts, each part into micro-batches,
    and each micro-batch over the grid's rows or over branches.

    Args:
        n_rows: B, which the number of parts must divide; see `n_parts`.
        micro_batches: Micro-batches of each replica.
        axes: The axes of the mesh.
    """

    def __init__(self, n_rows: int, micro_batches: int, axes: Axes) -> None:
        self.n_rows, self.n_micro, self.axes = n_rows, micro_batches, axes

    @staticmethod
    def n_parts(micro_batches: int, axes: Axes) -> int:
        """Returns the number of parts of a global batch."""
        return axes.dp.size * micro_batches * axes.batch.size

    def rows(self, micro: int) -> slice:
        """Returns the rows of the global batch that are this device's micro-batch `micro`."""
        batch = self.axes.batch
        size, rest = divmod(self.n_rows, self.n_parts(self.n_micro, self.axes))
        assert not rest, "gridformer.parallel.validation.check_layout was not called"
        part = (self.axes.dp.index * self.n_micro + micro) * batch.size + batch.index
        return slice(part * size, (part + 1) * size)

    @cached_property
    def all_rows(self) -> NDArray[np.int64]:
        """The rows of the global batch that this device reads: its micro-batches' rows in order."""
        parts = [self.rows(micro) for micro in range(self.n_micro)]
        return np.concatenate([np.arange(part.start, part.stop) for part in parts])

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Divides the data of `all_rows` into micro-batches, which are views of it.

        Models see the n sequences of each sample of `data.task: choice` as rows of their own.
        """
        size = len(self.all_rows) // self.n_micro
        tokens = batch["tokens"]
        n = tokens.shape[1] if tokens.dim() == 3 else 1
        if n > 1:
            batch = {k: x.flatten(0, 1) if k in _OF_SEQUENCES else x for k, x in batch.items()}
        parts = {
            key: value.split(size * n if key in _OF_SEQUENCES else size)
            for key, value in batch.items()
        }
        rows = [self.rows(micro) for micro in range(self.n_micro)]
        return [
            MicroBatch(
                slice(n * rows[micro].start, n * rows[micro].stop),
                self._of_row({key: part[micro] for key, part in parts.items()}),
            )
            for micro in range(self.n_micro)
        ]

    def _of_row(self, batch: Batch) -> Batch:
        """Returns what this row of the grid has of a micro-batch, if rows divide each sequence.

        That is its tokens and all that is local in tokens. Which tokens are padding, and documents,
        stay whole, as attention sees the keys of all rows. What belongs to a sequence counts on the
        first row only.
        """
        sequence = SequenceRows(self.axes.sequence.index, self.axes.sequence.size)
        if sequence.n == 1:
            return batch
        batch = dict(batch)
        for tokens, positions in (("tokens", "positions"), ("source", "source_positions")):
            if tokens in batch and positions not in batch:
                device, s = batch[tokens].device, batch[tokens].shape[1]
                batch[positions] = torch.arange(s, device=device).unsqueeze(0)
        batch |= {key: sequence.of_row(batch[key]) for key in _OF_TOKENS if key in batch}
        if sequence.index:
            others = {key: batch[key] for key in _COUNTED if key in batch}
            batch |= {key: torch.full_like(x, _nothing(x)) for key, x in others.items()}
            if "item" in batch:  # the row of those that are left out
                batch["item"] = torch.full_like(batch["item"], -1)
        return batch


class WholeModel:
    """Runs one micro-batch after the other through a whole model, with the face of an `Executor`.

    Args:
        model: This rank's model.
        sums: Sums gradients over replicas, beginning in backward passes.

    Attributes:
        follows: The micro-batches of a step that run; None for all. A record of a step has few.
        before_backward: Called between the passes of each micro-batch in training.
    """

    def __init__(self, model: Model, sums: GradientSums) -> None:
        self.model, self.sums = model, sums
        self.on_action: OnAction | None = None
        self.stops_before: StopsBefore | None = None
        self.follows: Sequence[int] | None = None
        self.before_backward: Callable[[], None] | None = None
        self.dropped = False

    def train(self, work: Sequence[MicroBatch], finish: Callable[[Tensor, Batch], Tensor]) -> None:
        for number in self.follows or range(len(work)):
            micro = work[number]
            self.dropped = bool(number and self.stops_before and self.stops_before(number))
            if self.dropped:
                return
            self.model.dropout_rng.at(micro.rows)
            with self._timed("forward", number):
                loss = finish(self.model.hidden(micro.batch), micro.batch)
            if self.before_backward is not None:
                self.before_backward()
            last = number == len(work) - 1
            with self._timed("backward", number), self.sums.backward(last):
                loss.backward()

    def evaluate(self, work: Sequence[MicroBatch], finish: Finish) -> None:
        for number in self.follows or range(len(work)):
            batch = work[number].batch
            with self._timed("forward", number):
                finish(self.model.hidden(batch), batch)

    def count(self, work: Sequence[MicroBatch]) -> None:
        for micro in work:
            self.model.dropout_rng.at(micro.rows)
            self.model.hidden(micro.batch)

    def _timed(self, kind: str, micro: int) -> AbstractContextManager[None]:
        return timed(self.on_action, kind, 0, micro, torch.cuda.is_initialized())

    def has_loaded(self) -> None:
        """Does nothing: only the messages of a pipeline depend on which kernels are loaded."""

    loads_again = has_loaded


class Passes:
    """Computes the losses of micro-batches, and their gradients, on this process's part of a model.

    The losses are this process's sums in float64, which are 0 if other processes compute them.

    Args:
        model: This rank's model.
        executor: Runs micro-batches through it: through its stages of a pipeline, or as a whole.
    """

    def __init__(self, model: Model, executor: Executor | WholeModel) -> None:
        self.model, self.executor = model, executor

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
        totals = _zeros(counts)

        def finish(hidden: Tensor, batch: Batch) -> Tensor:
            losses = self.model.losses_of(hidden, batch)
            _add(totals, losses)
            return weighted(losses, counts, scale)

        self.executor.train(work, finish)
        if self.executor.dropped:
            raise StepDropped
        return totals

    def evaluate(self, work: Sequence[MicroBatch], also: Finish | None = None) -> Losses:
        """Computes the losses without gradients.

        Args:
            work: This process's micro-batches.
            also: Called with the last hidden states of each micro-batch, and the micro-batch, where
                its last link runs.
        """
        totals = _zeros(Model.counts(work[0].batch))

        def finish(hidden: Tensor, batch: Batch) -> None:
            _add(totals, self.model.losses_of(hidden, batch))
            if also is not None:
                also(hidden, batch)

        self.executor.evaluate(work, finish)
        return totals

    @torch.no_grad()
    def mean_losses(
        self,
        split: RowSplit,
        device: torch.device,
        reads: Sequence[ReadRows],
        also: Finish | None = None,
    ) -> Evaluation:
        """Computes mean losses over several global batches, without dropout.

        All ranks call it together and get the same result.

        Args:
            split: Which rows of a batch are this rank's.
            device: Where it computes.
            reads: For each global batch, a function that reads rows of it, called once each.
            also: See `evaluate`.
        """
        axes = split.axes
        self.model.eval()
        totals: dict[str, Tensor] = {}
        with gathered_weights_scope(self.model):
            for read in reads:
                batch = on_device(read(split.all_rows), device)
                counts = Model.counts(batch)
                for name, loss in self.evaluate(split.micro_batches(batch), also).items():
                    # All ranks of a pipeline, and rows that divide each sequence, read the same
                    # rows of the batch. Only the last stage has losses.
                    count = counts[name] * int(axes.pp.index == axes.sequence.index == 0)
                    both = torch.stack((loss, count.to(loss.dtype)))
                    totals[name] = totals[name] + both if name in totals else both
        # One of the ranks that hold the same rows counts them.
        sums = torch.stack([*totals.values()]) * int(axes.same_batch.index == 0)
        means = comm.all_reduce(sums, axes.world, label="metrics").tolist()
        parts = {name: loss / max(1.0, count) for name, (loss, count) in zip(totals, means)}
        return Evaluation(sum(parts.values()), parts)


def _nothing(targets: Tensor) -> float:
    """Returns the target that does not count."""
    return math.nan if targets.is_floating_point() else IGNORE


def on_device(rows: Batch, device: torch.device) -> Batch:
    """Copies rows to a device."""
    return {key: value.to(device, non_blocking=True) for key, value in rows.items()}


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


def _zeros(counts: Mapping[str, Tensor]) -> Losses:
    """Returns a zero in float64 for each loss, on the device of its count."""
    return {
        name: torch.zeros((), dtype=torch.float64, device=count.device)
        for name, count in counts.items()
    }


def _add(totals: Losses, losses: Losses) -> None:
    """Adds losses to totals in place."""
    for name, loss in losses.items():
        if not loss.is_meta:  # another device computes it (D&SP-cSub)
            totals[name] += loss.detach()
