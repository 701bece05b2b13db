"""One optimizer step on any layout: forward, backward, gradients, clipping, update."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Axes
from gridformer.config import TrainConfig
from gridformer.errors import DivergedError
from gridformer.models import GPT2
from gridformer.models.blocks import IGNORE
from gridformer.parallel.gradients import (
    GradientSums,
    clip_gradients,
    owned,
    reduce_gradients,
    share_copies,
    squared_norm,
)
from gridformer.parallel.grid import weights_kept

# Reads the given rows of a step's global batch: [rows, s+1] tokens, inputs and shifted targets.
ReadRows = Callable[[slice], Tensor]


@dataclass(frozen=True)
class StepResult:
    """The same on every rank. loss: mean over the tokens of the global batch.

    flagged: some rank raised its flag (it was told to stop) before this step.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    flagged: bool = False


class Stepper:
    """Holds the optimizer and knows which rows of a global batch this device takes.

    A global batch of B sequences is cut into dp contiguous parts, each into micro-batches, each of
    those over the grid's rows or over branches: so every layout sees the same batch, in one order.
    """

    def __init__(self, model: GPT2, train: TrainConfig, axes: Axes) -> None:
        self.model, self.train, self.axes = model, train, axes
        self.sums = GradientSums.of(model, axes)
        held = next(model.parameters(), None)
        self.device = torch.device(axes.device_type) if held is None else held.device
        matrices = [p for _, p in owned(model) if p.dim() > 1]
        vectors = [p for _, p in owned(model) if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]] or groups[:1],
            lr=train.lr,
            betas=(train.beta1, train.beta2),
            eps=train.adam_eps,
            fused=True,
        )

    def rows(self, micro: int) -> slice:
        """The rows of a global batch that make up one of this device's micro-batches."""
        n_rows, n_micro = self.train.global_batch, self.train.micro_batches
        batch = self.axes.batch
        size, rest = divmod(n_rows, self.axes.dp.size * n_micro * batch.size)
        assert not rest, "gridformer.layout.check was not called"
        part = (self.axes.dp.index * n_micro + micro) * batch.size + batch.index
        return slice(part * size, (part + 1) * size)

    def __call__(self, step: int, read: ReadRows, flag: bool = False) -> StepResult:
        """Train on the global batch of `step` (counted from 0); all ranks learn of any flag.

        Raises DivergedError, on all ranks and before any update, if loss or norm is not finite.
        """
        micro_rows = [self.rows(micro) for micro in range(self.train.micro_batches)]
        batches = [self._to_device(read(rows)) for rows in micro_rows]
        mine = torch.stack([(b[:, 1:] != IGNORE).sum() for b in batches]).sum() * self._first()
        both = torch.stack((mine, torch.full_like(mine, flag)))
        count, flags = comm.all_reduce(both, self.axes.world, label="metrics")
        self.model.train()
        self.model.zero_grad(set_to_none=True)  # copies, which the optimizer has not, included
        loss_sum = torch.zeros((), device=count.device, dtype=torch.float64)
        self.model.clock.step = step
        with weights_kept(self.model):
            for micro, (rows, batch) in enumerate(zip(micro_rows, batches)):
                self.model.clock.at(rows)
                loss = self.model.loss_sum(batch[:, :-1], batch[:, 1:])
                last = micro == len(batches) - 1
                with self.sums.last_backward() if last else nullcontext():
                    (loss / count.to(loss.dtype)).backward()
                loss_sum += _value(loss)
        reduce_gradients(self.model, self.axes, self.sums)

        both = torch.stack((loss_sum * self._first(), squared_norm(self.model, self.axes)))
        total_loss, total_square = comm.all_reduce(both, self.axes.world, label="metrics").tolist()
        norm, tokens = math.sqrt(total_square), int(count)
        if not (math.isfinite(total_loss) and math.isfinite(norm)):
            raise DivergedError(
                f"step {step + 1}: the loss is {total_loss / tokens:g} and the gradient norm "
                f"{norm:g}; nothing was updated. Lower train.lr ({self.train.lr:g}), lengthen "
                f"train.warmup_steps ({self.train.warmup_steps}) or look at the data of this step"
            )
        clip_gradients(self.model, norm, self.train.clip_norm)
        lr = learning_rate(step, self.train)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        share_copies(self.model, self.axes)
        return StepResult(total_loss / tokens, norm, lr, tokens, flagged=bool(flags))

    @torch.no_grad()
    def evaluate(self, reads: list[ReadRows]) -> float:
        """Mean loss over several global batches, without dropout."""
        self.model.eval()
        device = self.device
        total = torch.zeros(2, dtype=torch.float64, device=device)  # of losses, of tokens
        with weights_kept(self.model):
            for read in reads:
                for micro in range(self.train.micro_batches):
                    batch = self._to_device(read(self.rows(micro)))
                    total[0] += _value(self.model.loss_sum(batch[:, :-1], batch[:, 1:]))
                    total[1] += (batch[:, 1:] != IGNORE).sum()
        total = comm.all_reduce(total * self._first(), self.axes.world, label="metrics")
        loss_sum, n_tokens = total.tolist()
        return loss_sum / n_tokens

    def _first(self) -> int:
        """1 on the one rank of those that hold the same rows, so that a world-wide sum is right."""
        return int(self.axes.alike.index == 0)

    def _to_device(self, batch: Tensor) -> Tensor:
        return batch.to(self.device, non_blocking=True)


def _value(loss: Tensor) -> Tensor | float:
    """A loss that is computed elsewhere (D&SP-cSub) has no value here: nothing to add."""
    return 0.0 if loss.is_meta else loss.detach()


def learning_rate(step: int, train: TrainConfig) -> float:
    """Linear warm-up, then a cosine down to min_lr_ratio at the last step."""
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    span = max(1, train.steps - 1 - train.warmup_steps)
    progress = min(1.0, (step - train.warmup_steps) / span)
    low = train.lr * train.min_lr_ratio
    return low + (train.lr - low) * 0.5 * (1 + math.cos(math.pi * progress))
