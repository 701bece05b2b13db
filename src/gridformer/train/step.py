"""One optimizer step on any layout: forward, backward, gradient reduction, clipping, update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm.autograd import one_thread
from gridformer.config import LayoutConfig, TrainConfig
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel.data.buckets import by_layer
from gridformer.parallel.data.copies import share_copies, share_parts
from gridformer.parallel.data.gradients import clear_gradients, reduce_gradients
from gridformer.parallel.pipeline import Executor, timed
from gridformer.parallel.tensor.experts import move_biases
from gridformer.parallel.tensor.summa import GatheredWeightsScope
from gridformer.train.attention import attending
from gridformer.train.forward_backward import (
    Finish,
    Passes,
    ReadRows,
    RowSplit,
    WholeModel,
    on_device,
)
from gridformer.train.in_flight_steps import (
    Copied,
    Evaluation,
    LossScale,
    StartedStep,
    StepResult,
)
from gridformer.train.optimizer import Updates, learning_rate
from gridformer.utils.batch import Batch, MicroBatch
from gridformer.utils.tensors import DeviceEvent


class Stepper:
    """Runs optimizer steps and evaluations of one model on one layout.

    Each device reads its rows of a global batch (`RowSplit`), so every layout trains on the same
    batch in the same order.

    Args:
        model: This rank's model, as `gridformer.parallel.build_parallel` returns it.
        train: The training config.
        axes: The axes of the mesh.
        layout: The layout. It may be None without a pipeline, which means one micro-batch.
    """

    def __init__(
        self, model: Model, train: TrainConfig, axes: Axes, layout: LayoutConfig | None = None
    ) -> None:
        self.model, self.train, self.axes = model, train, axes
        model.loss_chunk_tokens = train.loss_chunk_tokens
        model.recomputes(train.recompute, train.recompute_layers)
        model.uses_kernels(train.kernels == "fused")
        self.attention: str = train.attention
        self.micro_batches = layout.micro_batches if layout else 1
        self.split = RowSplit(train.global_batch, self.micro_batches, axes)
        self.updates = Updates(model, train, axes)
        self.sums = self.updates.sums
        self.sums.every_pass = layout is not None and layout.gradient_sync == "micro_batch"
        self.executor: Executor | WholeModel = WholeModel(model, self.sums)
        if axes.pp.size > 1:
            assert layout is not None, "a pipeline needs its layout"
            self.executor = Executor(model, layout, axes, self.sums)
        self.passes = Passes(model, self.executor)
        self.scale = LossScale.of(train.dtype)
        self.check = partial(self.scale.judge, train)
        # They stay the same objects, so they are found once: walking through a model's modules
        # takes time.
        self.parameters = [*model.parameters()]
        self.by_layer = by_layer(model)
        one_pass = self.micro_batches == 1 and not self.updates.in_backward
        self.kept = GatheredWeightsScope(model, one_pass and not self.sums.parameters)
        held = self.parameters[0].device if self.parameters else None
        self.device = held or torch.device(axes.device_type)
        # 1 on one of the ranks that hold the same rows: a sum then counts a row once.
        self._first = int(axes.same_batch.index == 0)
        self._last: StartedStep | None = None
        self._failed: Tensor | None = None  # 1 if any step so far was not finite, otherwise 0

    def __call__(self, step: int, read: ReadRows, flag: bool = False) -> StepResult:
        """Trains on the global batch of one step and waits for its result; see `start`."""
        return self.start(step, read, flag).result()

    def start(self, step: int, read: ReadRows, flag: bool = False) -> StartedStep:
        """Launches the training on the global batch of one step. All ranks call it together.

        The host waits for the device only to know the loss scale of float16. Elsewhere the next
        step can be started before the result of this one is read, so that a GPU always has work.
        A step whose loss or gradient norm is not finite updates nothing, and neither does any step
        that is started before its result is read; but with `update: in_backward` layers may be
        updated.

        Args:
            step: The number of the step, counted from 0.
            read: Reads rows of the step's global batch. It is called once, with `split.all_rows`.
            flag: Whether this rank was told to stop. Every rank's result tells if any rank was.
        """
        if self.scale.dynamic and self._last is not None:
            self._last.result()
        with self._timed("read the batch"):
            batch = self._read(read)
            work = self.split.micro_batches(batch)
            counts, tokens_and_flags = self._count(batch, flag)
        self.model.train()
        clear_gradients(self.parameters)
        self.model.dropout_rng.step = step
        lr = learning_rate(step, self.train)
        self.updates.begin(lr)
        scale = self.scale.scale
        with self.kept.open(), one_thread(), attending(self.attention):
            self._begin_balance(batch, work, scale)
            losses = self.passes.train(work, counts, scale)
        with self._timed("add up gradients"):
            reduce_gradients(self.parameters, self.axes, self.sums, self.updates.done)

        mine = [loss * self._first for loss in losses.values()]
        experts = self._end_balance(mine, counts)
        sums = torch.stack([*mine, *self.updates.squares()])
        totals = comm.all_reduce(sums, self.axes.world, label="metrics")
        numbers = torch.cat([totals, torch.stack([*counts.values()]), tokens_and_flags])
        copied = None if experts is None else Copied(experts)
        self._last = StartedStep(self.check, step, lr, scale, [*counts], Copied(numbers), copied)
        with self._timed("update"):
            overflow = self._overflow(totals)
            self.updates.finish(totals[-2:], overflow, scale)
            if experts is not None and self.model.config.router_bias:
                move_biases(self.model, experts, overflow)
            share_parts(self.by_layer, self.axes)
            share_copies(self.parameters, self.axes)
        self._last.ended = DeviceEvent(self.device)
        return self._last

    def _begin_balance(self, batch: Batch, work: Sequence[MicroBatch], scale: float) -> None:
        """Lets mixtures of experts count the tokens of a step, in a pass before if they must."""
        balance = self.model.balance
        if balance is None:
            return
        n_tokens = batch["tokens"].numel() // len(self.split.all_rows) * self.split.n_rows
        balance.begin(self.device, n_tokens, scale)
        if not balance.counts_first:
            return
        if isinstance(self.executor, WholeModel) and len(work) == 1:
            self.executor.before_backward = self._count_experts
            return
        with torch.no_grad(), self._timed("count"):
            self.executor.count(work)
            self._count_experts()

    def _count_experts(self) -> None:
        """Counts the tokens of each expert over the global batch, and counts no more."""
        balance = self.model.balance
        assert balance is not None
        balance.known(comm.all_reduce(balance.counts, self.axes.world, label="metrics"))

    def _end_balance(self, losses: list[Tensor], counts: dict[str, Tensor]) -> Tensor | None:
        """Adds the loss of balance, and returns the tokens of each expert [L, E]."""
        balance = self.model.balance
        if balance is None:
            return None
        if balance.n_terms:
            losses.append(balance.value)
            counts["balance"] = torch.full_like(next(iter(counts.values())), balance.n_terms)
        if balance.total is None:
            self._count_experts()
        return balance.total

    def start_ahead(self, step: int, read: ReadRows) -> StartedStep:
        """Starts a step as training does: a GPU gets it before the last result is read."""
        before = self._last
        started = self.start(step, read)
        if before is not None:
            before.result()
        if self.device.type != "cuda":
            started.result()
        return started

    def _overflow(self, totals: Tensor) -> Tensor:
        """Returns 1 on the device if the step must update nothing, otherwise 0, as float32."""
        overflow = 1.0 - totals.sum().isfinite().float()
        if self.scale.dynamic:
            return overflow
        if self._failed is not None:
            overflow = torch.maximum(overflow, self._failed)
        self._failed = overflow
        return overflow

    def _timed(self, kind: str) -> AbstractContextManager[None]:
        return timed(self.executor.on_action, kind, on_gpu=self.device.type == "cuda")

    def repeat(self, step: int, read: ReadRows) -> tuple[Batch, dict[str, Tensor], int]:
        """Computes the loss and the gradients of a step once more and updates nothing.

        All ranks call it together. With `update: in_backward` it computes no gradients.

        Returns:
            This rank's batch and its part of the losses, and the tokens of the global batch.
        """
        self.forget()
        batch = self._read(read)
        work = self.split.micro_batches(batch)
        counts, tokens_and_flags = self._count(batch, False)
        clear_gradients(self.parameters)
        self.model.dropout_rng.step = step
        stops_before, self.executor.stops_before = self.executor.stops_before, None
        self.executor.loads_again()  # the search for the cause launches kernels of its own
        with self.kept.open(), one_thread(), attending(self.attention):
            if self.updates.in_backward:
                self.model.eval()
                with torch.no_grad():
                    losses = self.passes.evaluate(work)
            else:
                self.model.train()
                self.updates.begin(0.0)
                self._begin_balance(batch, work, self.scale.scale)
                losses = self.passes.train(work, counts, self.scale.scale)
        if not self.updates.in_backward:
            reduce_gradients(self.parameters, self.axes, self.sums, self.updates.done)
        self.executor.stops_before = stops_before
        return batch, losses, int(tokens_and_flags[0])

    def forget(self) -> None:
        """Forgets the results of earlier steps, because one of them was not finite."""
        self._last = self._failed = None

    def evaluate(self, reads: Sequence[ReadRows], also: Finish | None = None) -> Evaluation:
        """Computes mean losses over several global batches; see `Passes.mean_losses`."""
        with attending(self.attention):
            return self.passes.mean_losses(self.split, self.device, reads, also)

    def _read(self, read: ReadRows) -> Batch:
        return on_device(read(self.split.all_rows), self.device)

    def _count(self, batch: Batch, flag: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Counts targets of each loss, and [tokens read, flags raised], over the global batch."""
        counts = Model.counts(batch)
        mine = [*counts.values(), Model.n_tokens(batch)]
        # All ranks of a pipeline, and rows that divide each sequence, read the same rows.
        first = int(self.axes.pp.index == self.axes.sequence.index == 0)
        mine = [count * self._first * first for count in mine]
        mine.append(torch.full_like(mine[0], flag))
        totals = comm.all_reduce(torch.stack(mine), self.axes.world, label="metrics")
        return dict(zip(counts, totals.unbind())), totals[-2:]
