"""A model of gridformer that is trained in torch's own way: one device, or a rank under FSDP2.

`fully_shard` sums gradients over replicas. What else a layout needs, sums over copies and over the
stages of a pipeline, is written here by hand, as a user of FSDP2 would have to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from benchmarks.fsdp2.problem import CLIP, DECAY, EPS, RATE, ROWS, STEPS, Method, batch_of
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.models.blocks import Layer
from gridformer.parallel.sharding import ParamShard
from gridformer.train.forward_backward import RowSplit
from gridformer.utils.batch import IGNORE, Batch

Tensors = dict[str, Tensor]


@dataclass
class Found:
    """What training has computed: losses and norms of all steps, the first gradients, weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)


class Trained:
    """A model, its optimizers and its part of each batch.

    Args:
        model: A model of gridformer, whose parameters `fully_shard` may have sharded.
        axes: The axes of this process.
        method: How it is trained.
        shards: What this rank holds of each parameter before FSDP2 shards it; None where all ranks
            hold all of them.
        once: Whether this rank's part of a parameter counts in a norm, as other ranks may have
            copies of it; None lets torch's `clip_grad_norm_` compute norms, which knows of none.
    """

    def __init__(
        self,
        model: Model,
        axes: Axes,
        method: Method,
        shards: Mapping[str, ParamShard] | None = None,
        once: Callable[[nn.Parameter], bool] | None = None,
    ) -> None:
        self.model, self.axes, self.method = model, axes, method
        self.shards, self.once = shards or {}, once
        self.split = RowSplit(ROWS, method.micro_batches, axes)
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.found = Found()
        self.units = self._units()
        self.optimizers = [_optimizer(unit) for unit in self.units]
        if method.again:
            model.recomputes("full")
        if method.in_backward:
            for unit, optimizer in zip(self.units[:-1], self.optimizers[:-1]):
                _UpdatesInBackward(self, unit, optimizer)

    def train(self) -> Found:
        """Trains a few steps and returns what they have computed."""
        self.model.train()
        for step in range(STEPS):
            self._step(step)
        weights = self.model.named_parameters()
        self.found.weights = {name: _whole(p.detach()).clone() for name, p in weights}
        return self.found

    def gradients(self, batch: Batch, count: Tensor) -> Tensor:
        """Accumulates the gradients of a step and returns this rank's sum of losses."""
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(self.method.micro_batches):
            self.sums_now(micro == self.method.micro_batches - 1)
            rows = self.split.rows(micro)
            self.model.dropout_rng.at(rows)
            part = {key: value[rows] for key, value in batch.items()}
            loss = torch.stack([*self.model.losses(part).values()]).sum()
            (loss / count).backward()
            total += loss.detach().double()
        return total

    def sums_now(self, last: bool) -> None:
        """Tells FSDP2 whether the next backward pass is the last one, in which gradients travel."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
            self.model.set_reshard_after_backward(last or self.method.reshards)

    def clip(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Clips gradients by their common norm, which it returns."""
        once = self.once
        if once is None:
            return _whole(torch.nn.utils.clip_grad_norm_(parameters, CLIP))
        with torch.no_grad():
            mine = [_local(p.grad) for p in parameters if p.grad is not None and once(p)]
            squares = sum((grad.square().sum() for grad in mine), torch.zeros(()).double())
            dist.all_reduce(squares)
            norm: Tensor = squares.sqrt()
            for parameter in parameters:
                if parameter.grad is not None:
                    _local(parameter.grad).mul_((CLIP / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def keep(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keeps the gradients of the first step."""
        if not self.found.losses:
            for parameter in parameters:
                if parameter.grad is not None:
                    name = self.names[parameter]
                    self.found.gradients[name] = _whole(parameter.grad).clone()

    def _step(self, number: int) -> None:
        batch = batch_of(self.model.config, number)
        self.model.dropout_rng.step = number
        self.model.zero_grad(set_to_none=True)
        count = (batch["targets"] != IGNORE).sum()
        total = self.gradients(batch, count) * (self.axes.same_batch.index == 0)
        self._sum_copies()
        later = [*zip(self.units, self.optimizers)][-1 if self.method.in_backward else 0 :]
        for unit, _ in later:
            self.keep(unit)
        if self.method.clip_by == "layer":
            norms = [self.clip(unit) for unit, _ in later]
        else:
            norms = [self.clip([parameter for unit, _ in later for parameter in unit])]
        for _, optimizer in later:
            optimizer.step()
        if dist.is_initialized() and self.axes.world.size > 1:
            dist.all_reduce(total)
        self.found.losses.append(float(total / count))
        self.found.norms.append(float(norms[-1]))

    @torch.no_grad()
    def _sum_copies(self) -> None:
        """Sums what FSDP2 knows nothing of: partial sums on copies, and what stages share."""
        for name, parameter in self.model.named_parameters():
            shard = self.shards.get(name)
            if shard is None or parameter.grad is None:
                continue
            if shard.partial and shard.copies:
                dist.all_reduce(_local(parameter.grad), group=self.axes[shard.copies].group)
            if shard.stages:
                dist.all_reduce(_local(parameter.grad), group=self.axes.pp.group)

    def _units(self) -> list[list[nn.Parameter]]:
        """Returns the matrices of each layer, and everything else, as gridformer's optimizer."""
        layers = [module for module in self.model.modules() if isinstance(module, Layer)]
        units = [[p for p in layer.parameters() if p.dim() > 1] for layer in layers]
        inside = {parameter for unit in units for parameter in unit}
        return [*units, [p for p in self.model.parameters() if p not in inside]]


class _UpdatesInBackward:
    """Clips and updates a layer as soon as its gradients are summed, and frees them."""

    def __init__(
        self, of: Trained, unit: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        self.of, self.unit, self.optimizer = of, unit, optimizer
        self.missing = set(unit)
        for parameter in unit:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: Tensor) -> None:
        self.missing.discard(parameter)
        if self.missing:
            return
        self.missing = set(self.unit)
        self.of.keep(self.unit)
        self.of.clip(self.unit)
        self.optimizer.step()
        for one in self.unit:
            one.grad = None


def _optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=RATE, eps=EPS)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(
    got: Found, want: Found, shards: Mapping[str, ParamShard] | None = None
) -> dict[str, float]:
    """Returns the largest relative differences; see `TOLERANCE`."""

    def apart(mine: Tensors, theirs: Tensors) -> float:
        worst = 0.0
        for name, tensor in mine.items():
            whole = theirs[name]
            shard = (shards or {}).get(name)
            block = whole if shard is None else shard.block_of(whole, tensor.shape)
            worst = max(worst, float((tensor - block).abs().max() / whole.abs().max()))
        return worst

    losses = [abs(a / b - 1) for a, b in zip(got.losses, want.losses, strict=True)]
    norms = [abs(a / b - 1) for a, b in zip(got.norms, want.norms, strict=True)]
    assert got.gradients.keys() == got.weights.keys() <= want.weights.keys()
    return {
        "loss": max(losses),
        "norm": max(norms),
        "gradient": apart(got.gradients, want.gradients),
        "weight": apart(got.weights, want.weights),
    }
