"""Which activations of blocks are kept for the backward pass, and which are computed again.

    none        all that backward needs
    selective   scores and probabilities of attention are computed again (Korthikanti et al. 2022);
                with a fused kernel they never exist
    full        of each block its input alone, and that cut over the devices that would all hold it

What is computed again ends where backward needs no more of it: the last product of a block is not
multiplied again, unless a norm reads it. Dropout's masks are functions of a sample's place, so they
are the same again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

Mode = Literal["none", "selective", "full"]


def in_backward() -> bool:
    """Whether the code that asks runs inside a backward pass, or is computed again for one."""
    return torch._C._current_graph_task_id() != -1


class ActivationPartition(Protocol):
    """How several devices share what each of them would hold."""

    def part(self, x: Tensor) -> Tensor:
        """This device's part of x, in memory of its own."""

    def whole(self, part: Tensor, like: torch.Size) -> Tensor:
        """x again, of this shape, from all parts."""


class Unpartitioned:
    """Nobody else holds it."""

    def part(self, x: Tensor) -> Tensor:
        return x

    def whole(self, part: Tensor, like: torch.Size) -> Tensor:
        return part


class _Input:
    """A block's input: itself during the forward pass, then this device's part of it."""

    def __init__(self, x: Tensor) -> None:
        self._x: Tensor | None = x
        self._shape, self._wanted = x.shape, x.requires_grad

    def keep(self, partition: ActivationPartition) -> None:
        assert self._x is not None
        self._part, self._partition, self._x = partition.part(self._x.detach()), partition, None

    def take(self) -> Tensor:
        if self._x is not None:
            return self._x
        whole = self._partition.whole(self._part, self._shape)
        return whole.detach().requires_grad_(self._wanted)


class _Begin(torch.autograd.Function):
    """The end of a block that is computed again before anything else of it is gone back through,
    whether this device needs it by then or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _ = ctx.saved_tensors
        return grads[0]


@dataclass
class Recompute:
    """What a model does about its blocks.

    partition: of each block's input. stops_early: whether computing again may begin when this
    device first needs something, and end as soon as it needs no more; not where others wait for it.
    """

    mode: Mode = "none"
    partition: ActivationPartition = field(default_factory=Unpartitioned)
    stops_early: bool = True
    _hooks: dict[nn.Module, list[Callable[[Tensor], None]]] = field(default_factory=dict)

    def before_backward(self, block: nn.Module, hook: Callable[[Tensor], None]) -> None:
        """Call `hook` in every backward pass when the gradient of the block's output is there,
        before anything of the block is computed again or gone back through.

        A hook on what the block itself returns would come after the computing again where
        `stops_early` is false, and before it where it is true: devices that have to agree on the
        order of their messages would not.
        """
        self._hooks.setdefault(block, []).append(hook)

    def block(self, block: nn.Module, x: Tensor, *rest: Any) -> Tensor:
        """block(x, *rest). With `full`, what is made inside is let go of; `rest` is kept as it is,
        since all blocks of a stack share it."""
        out = self._run(block, x, *rest)
        if out.requires_grad:
            for hook in self._hooks.get(block, ()):
                out.register_hook(hook)
        return out

    def _run(self, block: nn.Module, x: Tensor, *rest: Any) -> Tensor:
        if self.mode != "full" or not torch.is_grad_enabled():
            out: Tensor = block(x, *rest)
            return out
        entering = _Input(x)

        def run() -> Tensor:  # no arguments, of which torch expects that they are on one device
            found: Tensor = block(entering.take(), *rest)
            return found if self.stops_early else _Begin.apply(found)

        with set_checkpoint_early_stop(self.stops_early):
            out = checkpoint(run, use_reentrant=False, preserve_rng_state=False)
        entering.keep(self.partition)
        return out

    def attention(self, run: Callable[..., Tensor], *args: Any) -> Tensor:
        """run(*args), from queries, keys and values to results."""
        if self.mode != "selective" or not torch.is_grad_enabled():
            return run(*args)
        out: Tensor = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
        return out
