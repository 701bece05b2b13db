"""Which activations of blocks are kept for the backward pass, and which are recomputed.

    none              keeps everything that backward needs
    selective         recomputes scores and probabilities of attention (Korthikanti et al. 2022);
                      with a fused kernel they never exist
    full              keeps only the input of each block, sharded over the devices that would all
                      hold it
    except_attention  also keeps the results of fused attention, and what its kernel saves besides
                      queries, keys and values, so that these are recomputed and attention is not

Recomputation stops as soon as backward has what it needs: the last product of a block is not
recomputed unless a norm reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from gridformer.utils.torch_private import is_same_view

Mode = Literal["none", "selective", "full", "except_attention"]
BLOCKS = ("full", "except_attention")  # the modes that recompute whole blocks


class ActivationPartition(Protocol):
    """Shards an activation over devices that would otherwise all hold it in full."""

    def part(self, x: Tensor) -> Tensor:
        """Returns this device's part of x, in memory of its own."""

    def whole(self, part: Tensor, like: torch.Size) -> Tensor:
        """Gathers all parts and returns x with the shape `like`."""


class _Input:
    """A block's input: the whole tensor during the forward pass, then this device's part of it."""

    def __init__(self, x: Tensor) -> None:
        self._x: Tensor | None = x
        self._shape, self._wanted = x.shape, x.requires_grad

    def keep(self, partition: ActivationPartition | None) -> None:
        assert self._x is not None
        part = self._x.detach()
        self._part = part if partition is None else partition.part(part)
        self._partition, self._x = partition, None

    def take(self) -> Tensor:
        if self._x is not None:
            return self._x
        whole = self._part
        if self._partition is not None:
            whole = self._partition.whole(whole, self._shape)
        return whole.detach().requires_grad_(self._wanted)


class _Begin(torch.autograd.Function):
    """An identity at the end of a block that saves a tensor.

    Its backward therefore triggers the recomputation of the block before anything else in the
    block runs backward, whether this device needs it by then or not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _ = ctx.saved_tensors
        return grads[0]


class _Anchor(torch.autograd.Function):
    """An identity of queries, keys and values that saves them where the block's are recomputed."""

    @staticmethod
    def forward(ctx: Any, *heads: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*heads)
        return tuple(x.view_as(x) for x in heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


class _Known(torch.autograd.Function):
    """Returns a result that is known, and saves queries, keys and values as `_Anchor` does."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *heads: Tensor) -> Tensor:
        ctx.save_for_backward(*heads)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise AssertionError("the graph of a recomputation has no backward pass")


class _KeptAttention:
    """The results of attention in one run of a block, in order, for its recomputation."""

    def __init__(self) -> None:
        self.results: list[Tensor] = []
        self.again: list[Tensor] | None = None  # those that the recomputation has not taken yet

    def run(self, attend: Callable[..., Tensor], heads: tuple[Tensor, ...]) -> Tensor:
        """Returns attend(*heads); a recomputation takes the result from before."""
        if self.again is not None:
            known: Tensor = _Known.apply(self.again.pop(0), *heads)
            return known
        heads = _Anchor.apply(*heads)
        anchor, saved, anchored = heads[0].grad_fn, list[Tensor](), [*heads]

        def pack(x: Tensor) -> Tensor | int:
            for i, head in enumerate(anchored):
                if is_same_view(x, head):
                    return i
            return x.detach()  # a result with its graph would keep itself alive

        def unpack(x: Tensor | int) -> Tensor:
            if isinstance(x, Tensor):
                return x
            if not saved:  # they may be read only once
                saved.extend(anchor.saved_tensors)  # type: ignore[union-attr]
            return saved[x]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            result = attend(*heads)
        anchored.clear()  # what is packed keeps these functions
        self.results.append(result.detach())
        return result


class _ReadValues:
    """What the host has read from the device in one run of a block, for its recomputation."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.again: list[Any] | None = None  # those that the recomputation has not taken yet

    def of(self, read: Callable[[], Any]) -> Any:
        if self.again is not None:
            return self.again.pop(0)
        self.values.append(read())
        return self.values[-1]


@dataclass
class Recompute:
    """Runs the blocks of a model and recomputes their activations as configured.

    Attributes:
        mode: What is recomputed; see the module's docstring.
        partition: How each block's input is partitioned with `full`, if other devices hold it, too.
        whole: Blocks that are not recomputed with `full` and `except_attention`.
        stops_early: Whether recomputation may begin when this device first needs a saved tensor and
            stop as soon as it needs no more. False if other devices wait for its messages.
    """

    mode: Mode = "none"
    partition: ActivationPartition | None = None
    stops_early: bool = True
    whole: set[nn.Module] = field(default_factory=set)
    _kept: _KeptAttention | None = None
    _read: _ReadValues | None = None
    _hooks: dict[nn.Module, list[Callable[[Tensor], None]]] = field(default_factory=dict)

    def before_backward(self, block: nn.Module, hook: Callable[[Tensor], None]) -> None:
        """Registers a hook that every backward pass calls with the gradient of the block's output.

        It runs before anything in the block is recomputed or runs backward. A hook on the tensor
        that the block itself returns would run after recomputation if `stops_early` is false and
        before it if true, so that devices could disagree on the order of their messages.
        """
        self._hooks.setdefault(block, []).append(hook)

    def block(self, block: nn.Module, x: Tensor, *rest: Any) -> Tensor:
        """Runs block(x, *rest).

        With `full`, activations inside the block are freed. `rest` is kept as it is, because all
        blocks of a stack share it.
        """
        out = self._run(block, x, *rest)
        if out.requires_grad:
            for hook in self._hooks.get(block, ()):
                out.register_hook(hook)
        return out

    def _run(self, block: nn.Module, x: Tensor, *rest: Any) -> Tensor:
        if self.mode not in BLOCKS or block in self.whole or not torch.is_grad_enabled():
            out: Tensor = block(x, *rest)
            return out
        entering, kept, values = _Input(x), _KeptAttention(), _ReadValues()

        def run() -> Tensor:  # without arguments, which torch expects to be on one device
            self._kept = kept if self.mode == "except_attention" else None
            self._read = values
            try:
                result: Tensor = block(entering.take(), *rest)
            finally:  # torch ends a recomputation by an exception
                self._kept, kept.again = None, [*kept.results]
                self._read, values.again = None, [*values.values]
            return result if self.stops_early else _Begin.apply(result)

        with set_checkpoint_early_stop(self.stops_early):
            out = checkpoint(run, use_reentrant=False, preserve_rng_state=False)
        entering.keep(self.partition)
        return out

    def attention(self, run: Callable[..., Tensor], *args: Any) -> Tensor:
        """Runs attention, `run(*args)`, from queries, keys and values to results."""
        if self.mode != "selective" or not torch.is_grad_enabled():
            return run(*args)
        out: Tensor = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
        return out

    def read(self, read: Callable[[], Any]) -> Any:
        """Returns what `read()` gets from the device, which a recomputation does not ask again."""
        return read() if self._read is None else self._read.of(read)

    def fused(self, attend: Callable[..., Tensor], *heads: Tensor) -> Tensor:
        """Runs a fused kernel of attention, `attend(*heads)`, of queries, keys and values."""
        return attend(*heads) if self._kept is None else self._kept.run(attend, heads)
