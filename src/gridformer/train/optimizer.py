"""The optimizer, which clips, updates and offloads parameters in units, and the learning rate.

A unit is the matrices of one layer; the last unit is everything else: embeddings, heads, vectors.
With `update: in_backward` a layer is updated as soon as its gradients are complete and summed over
replicas. Its gradients are then freed, so that the memory for the gradients of one layer (of two
while sums over replicas are in flight) serves all layers, if there is a single micro-batch.

Clipping: `global` uses the norm of all gradients, which is known only after the last of them, so it
excludes `in_backward`. `layer` clips each unit by its own norm. Both give the same result on every
layout, and `layer` gives the same result with every `update`.

`optimizer: muon` updates the matrices of layers by gridformer.train.muon, and the rest by AdamW.

`offload: optimizer` keeps the moments in host memory and copies the moments of a unit to the device
while it is updated. The arithmetic is the same as without offloading. Moments that are kept in
bfloat16 are cast so, too, and rounded after the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.config import TrainConfig
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.models.blocks import Layer
from gridformer.parallel.data.fsdp import drop_copies
from gridformer.parallel.data.gradients import (
    GradientSums,
    clippings,
    counted_square,
    reduce_gradients,
    scale_gradients,
)
from gridformer.parallel.data.zero import own_part
from gridformer.parallel.sharding import shard_of
from gridformer.parallel.tensor.summa import sum_within_blocks
from gridformer.train.muon import Muon, muon_matrices

LABEL = "norms"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class UpdateUnit:
    """Parameters of this rank that are updated together."""

    parameters: list[nn.Parameter]  # the parameters
    # The tensors that the optimizers update: the parameters, or this rank's ZeRO shards of them
    updated: list[nn.Parameter]
    optimizers: list[torch.optim.AdamW | Muon]  # the optimizers of `updated`

    @staticmethod
    def of(
        parameters: list[nn.Parameter],
        train: TrainConfig,
        axes: Axes,
        matrices: Mapping[nn.Parameter, int],
    ) -> UpdateUnit:
        """Builds a unit of `parameters`; vectors such as biases and norms get no weight decay.

        Muon updates those of them that are among `matrices`, as `muon_matrices` returns them.
        """
        orthogonal = {p: matrices[p] for p in parameters if p in matrices}
        rest = [own_part(parameter) for parameter in parameters if parameter not in orthogonal]
        groups = [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": train.weight_decay},
            {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizers: list[torch.optim.AdamW | Muon] = []
        if orthogonal:
            optimizers.append(Muon(orthogonal, train, axes))
        if rest or not orthogonal:
            adamw = torch.optim.AdamW(
                [group for group in groups if group["params"]] or groups[:1],
                lr=train.lr,
                betas=(train.beta1, train.beta2),
                eps=train.adam_eps,
                fused=True,
            )
            optimizers.append(adamw)
        return UpdateUnit(parameters, [own_part(p) for p in parameters], optimizers)

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """The optimizers' state by updated parameter."""
        states = [one.state for one in self.optimizers]
        return {p: state[p] for p in self.updated for state in states if p in state}


class Updates:
    """The optimizer of this rank's parameters; see the module's docstring.

    Args:
        model: This rank's model.
        train: The training config.
        axes: The axes of the mesh.

    Attributes:
        units: The units, the last of which holds everything that is in no other.
        sums: The sums of gradients over replicas. With `update: in_backward` each of their messages
            belongs to one unit.
        in_backward: Whether layers are updated within the backward pass.
        around: Makes the context in which each unit is updated.
    """

    def __init__(self, model: Model, train: TrainConfig, axes: Axes) -> None:
        self.model, self.train, self.axes = model, train, axes
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext
        layers = [module for module in model.modules() if isinstance(module, Layer)]
        self.in_backward = train.update == "in_backward"
        self._copies_moments = train.offload == "optimizer" or train.moments_dtype == "bfloat16"
        apart = self.in_backward or train.clip_by == "layer" or self._copies_moments
        muon = train.optimizer == "muon"
        matrices = muon_matrices(model, train.muon_by_head) if muon else {}
        held = {p: None for p in model.parameters() if shard_of(p).owned}
        self.units: list[UpdateUnit] = []
        if apart:
            for layer in layers:
                mine = [p for p in layer.parameters() if p in held and p.dim() > 1]
                for parameter in mine:
                    del held[parameter]
                self.units.append(UpdateUnit.of(mine, train, axes, matrices))
        # Copies of heads that several columns hold; all ranks sum the gradients of a layer's copies
        # together, whether they own them or not.
        self._copied = [
            [p for p in layer.parameters() if p.dim() > 1 and shard_of(p).partial]
            for layer in layers
        ]
        self.units.append(UpdateUnit.of([*held], train, axes, matrices))
        self.sums = GradientSums.of(
            model, axes, [unit.parameters for unit in self.units] if self.in_backward else None
        )
        self._overflow: Tensor | None = None  # 1 if a clipped layer's norm was not finite, else 0
        self._squares: list[Tensor] = []
        self._reached: list[int] = []
        self._updated: set[int] = set()
        self._inside = False
        in_layers = {p for unit in self.units[:-1] for p in unit.parameters}
        # The norms of layers are all-reduced in the backward pass, so all ranks of a stage must
        # have the same lag, including ranks that hold no matrix of any layer (on the other
        # sub-grids of D&SP-cSub).
        in_flight = axes.dp.size > 1 or not in_layers.isdisjoint(self.sums.parameters)
        self._lag = int(in_flight)
        if self.in_backward:
            sum_within_blocks(model)
            for number, layer in enumerate(layers):
                model.recompute.before_backward(layer, partial(self._reach, number))
            self.sums.around_last = self._around_last
        self.allocate(0)

    @property
    def done(self) -> set[nn.Parameter]:
        """The parameters that the backward pass updates."""
        if not self.in_backward:
            return set()
        layers = [unit.parameters for unit in self.units[:-1]]
        return {parameter for unit in (*layers, *self._copied) for parameter in unit}

    # ------------------------------------------------------------------ for checkpoints

    @property
    def state(self) -> Mapping[nn.Parameter, dict[str, Tensor]]:
        """The optimizers' state by updated parameter; offloaded moments are in host memory."""
        if self.train.offload == "optimizer" and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # moments of the last update may still be on their way
        return {p: state for unit in self.units for p, state in unit.state.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all units."""
        each = [one for unit in self.units for one in unit.optimizers]
        return [group for one in each for group in one.param_groups]

    def allocate(self, step: int) -> None:
        """Allocates the optimizers' state as it is after `step` updates, with zero moments."""
        for optimizer in (one for unit in self.units for one in unit.optimizers):
            muon = isinstance(optimizer, Muon)
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                names = ("momentum",) if muon else _MOMENTS
                state = {name: self._moment_of(parameter) for name in names}
                if not muon:
                    # torch.tensor would not make a fake tensor on machines that have a GPU.
                    state["step"] = torch.full((), float(step), device=parameter.device)
                optimizer.state[parameter] = state

    def _moment_of(self, parameter: Tensor) -> Tensor:
        """Returns a zero moment in the memory where it is kept."""
        dtype = torch.bfloat16 if self.train.moments_dtype == "bfloat16" else parameter.dtype
        if self.train.offload != "optimizer":
            return torch.zeros_like(parameter, dtype=dtype)
        pinned = parameter.device.type == "cuda"  # the GPU can then copy it without the CPU
        return torch.zeros_like(parameter, dtype=dtype, device="cpu", pin_memory=pinned)

    # ------------------------------------------------------------------ a step

    def begin(self, lr: float) -> None:
        """Begins a step with the learning rate `lr`. Call it before the forward pass."""
        self._overflow, self._squares, self._updated = None, [], set()
        for group in self.param_groups:
            group["lr"] = lr

    def squares(self) -> list[Tensor]:
        """Returns this rank's contributions, in float64, to two squared gradient norms.

        These are the squared norms of all gradients and of the last unit's gradients. A sum over
        all ranks completes them. Call it when the gradients are complete.
        """
        each = [counted_square(unit.updated, self.axes) for unit in self.units]
        return [torch.stack([*each, *self._squares]).sum(), each[-1]]

    def finish(self, squares: Tensor, overflow: Tensor, scale: float = 1.0) -> None:
        """Clips and updates the units that the backward pass has not updated.

        The host does not wait for a norm: the device computes the factors.

        Args:
            squares: The sums over all ranks of what `squares` returns, float64 of shape [2].
            overflow: A float32 scalar on the device: 1 if nothing may be updated, otherwise 0.
            scale: The loss scale, which the gradients still contain.
        """
        clip = self.train.clip_norm
        missed = {*range(len(self.units) - 1)} - self._updated if self.in_backward else ()
        assert not any(self.units[number].parameters for number in missed), "backward missed layers"
        norm, last_norm = (squares.sqrt() / scale).unbind()
        if self.train.clip_by == "global":
            factor = clippings(norm, clip) / scale
            for unit in self.units[-1:] if self.in_backward else self.units:
                self._update(unit, factor, overflow)
            return
        *layers, last = self.units
        if layers and not self.in_backward:  # a stage may have none
            each = torch.stack([counted_square(unit.updated, self.axes) for unit in layers])
            factors = clippings(self._over_stage(each).sqrt() / scale, clip) / scale
            for unit, factor in zip(layers, factors.unbind()):
                self._update(unit, factor, overflow)
        self._update(last, clippings(last_norm, clip) / scale, overflow)

    def _update(
        self, unit: UpdateUnit, factor: Tensor | None = None, overflow: Tensor | None = None
    ) -> None:
        """Updates a unit, with its gradients scaled by `factor`; see `finish` for `overflow`."""
        # The fused optimizer multiplies gradients by 1 / grad_scale, and updates nothing if
        # found_inf is 1. torch's GradScaler gives it both in the same way.
        with self.around():
            scale = None if factor is None else scale_gradients(unit.updated, factor)
            with self._moments_on_device(unit):
                for optimizer in unit.optimizers:
                    there: Any = optimizer
                    there.found_inf, there.grad_scale = overflow, scale
                    there.step()
        for parameter in unit.parameters:
            drop_copies(parameter)

    @contextmanager
    def _moments_on_device(self, unit: UpdateUnit) -> Iterator[None]:
        """Holds copies of a unit's moments as they are computed with inside the context.

        None are made of moments that lie on the device in the type of the parameter.
        """
        if not self._copies_moments:
            yield
            return
        kept = []
        for parameter, state in unit.state.items():
            for name in (name for name in state if name != "step"):
                kept.append((state, name, state[name]))
                to = parameter.device, parameter.dtype
                state[name] = state[name].to(*to, non_blocking=True, copy=True)
        yield
        for state, name, home in kept:
            # Not waited for: later copies to the device come after it, and `state` waits.
            state[name] = home.copy_(state[name], non_blocking=True)

    def _over_stage(self, squares: Tensor) -> Tensor:
        """Sums over all ranks that hold shards of the same layers."""
        for axis in (self.axes.grid, self.axes.dp_branch):
            squares = comm.all_reduce(squares, axis, label=LABEL)
        return squares

    # ------------------------------------------------------------------ within the backward pass

    @contextmanager
    def _around_last(self) -> Iterator[None]:
        """Wraps the last backward pass of a stage, which updates each layer of the stage."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
        self._update_reached(0)

    def _reach(self, number: int, _: Tensor) -> None:
        """Hook: backward is about to enter layer `number`, so the layers after it are complete."""
        if self._inside:
            self._update_reached(self._lag)
            self._reached.append(number)

    def _update_reached(self, lag: int) -> None:
        """Updates the layers that backward has reached, except for the last `lag` of them.

        The sums over replicas of those last ones are still in flight.
        """
        while len(self._reached) > lag:
            number = self._reached.pop(0)
            unit = self.units[number]
            self._updated.add(number)
            self.sums.finish_of(unit.parameters)
            reduce_gradients(self._copied[number], self.axes)
            square = counted_square(unit.updated, self.axes)
            self._squares.append(square)
            if self.train.clip_by == "layer":
                self._update_if_finite(unit, self._over_stage(square.clone()))
            else:
                self._update(unit)
            for parameter in (*unit.parameters, *unit.updated, *self._copied[number]):
                parameter.grad = None

    def _update_if_finite(self, unit: UpdateUnit, square: Tensor) -> None:
        """Clips and updates a layer unless its norm, or an earlier layer's, is not finite.

        The device decides this by itself, because the host would have to wait for the norm.
        """
        overflow = 1.0 - square.isfinite().float()
        if self._overflow is not None:
            overflow = torch.maximum(overflow, self._overflow)
        self._overflow = overflow
        self._update(unit, clippings(square.sqrt(), self.train.clip_norm), overflow)


def learning_rate(step: int, train: TrainConfig) -> float:
    """Returns the learning rate of a step (counted from 0).

    It is a function of the step and the config alone, so a resumed run goes on with the rates that
    it would have had, and nothing is saved for them. It rises linearly to `lr` over `warmup_steps`,
    and then follows `lr_schedule`:

    - inverse_sqrt: falls as 1 / sqrt(step) (Vaswani et al. 2017)
    - cosine: falls along half a wave (Loshchilov and Hutter 2017) until the last step
    - wsd: stays, and falls over the last steps (Hu et al. 2024; "1-sqrt": Hägele et al. 2024)
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.lr_schedule == "constant":
        return train.lr
    if train.lr_schedule == "inverse_sqrt":
        return train.lr * math.sqrt(train.warmup_steps / (step + 1))
    start, shape = train.warmup_steps, str(train.lr_schedule)
    if train.lr_schedule == "wsd":
        start, shape = train.steps - 1 - train.decay_steps, train.decay_shape
    x = min(1.0, max(0.0, (step - start) / max(1, train.steps - 1 - start)))
    # What remains of the fall after a fraction x of its steps: 1 at x = 0, 0 at x = 1.
    if shape == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * x))
    else:
        left = 1.0 - (x if shape == "linear" else math.sqrt(x))
    return train.lr * (train.min_lr_ratio + (1.0 - train.min_lr_ratio) * left)
