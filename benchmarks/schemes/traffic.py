"""Counts collectives as torch issues them, and gives the formulas for the expected volumes.

gridformer counts its own collectives (`gridformer.comm.record_messages`). Those of torch's DTensor
and FSDP2 are counted here where torch dispatches them, by the same convention: the elements that
must cross one rank's link whatever the algorithm (`gridformer.comm.recorder.Record.moved`).
Elements have four bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from benchmarks.schemes.cases import Size
from gridformer import comm

_ITEM = 4  # bytes of a reported element


@dataclass
class Traffic:
    """Collectives by kind, and the elements that this rank moved."""

    count: Counter[str] = field(default_factory=Counter)
    elements: float = 0.0


@contextmanager
def gridformer_traffic() -> Iterator[Traffic]:
    """Count what gridformer issues inside the block."""
    traffic = Traffic()
    with comm.record_messages() as recorder:
        yield traffic
    traffic.count = recorder.count()
    traffic.elements = recorder.bytes() / _ITEM


@contextmanager
def torch_traffic() -> Iterator[Traffic]:
    """Count every collective that torch dispatches inside the block, including in backward."""
    with _Counter() as counter:
        yield counter.traffic


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented  # a DTensor: torch calls again with the local tensors
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func._schema.name.split("::")[1], args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        if name in _SILENT:
            return
        if name not in _COLLECTIVES:
            raise NotImplementedError(f"benchmarks.traffic does not know the collective {name}")
        kind, moved = _COLLECTIVES[name]
        self.traffic.count[kind] += 1
        self.traffic.elements += moved(args) / _ITEM


# These move none of a layer's data.
_SILENT = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_"}


def _n_bytes(x: Any) -> int:
    if isinstance(x, Tensor):
        return x.numel() * x.element_size()
    return sum(_n_bytes(part) for part in x)


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """Find the process group among the arguments: an object, or the name of a functional one."""
    for arg in args:
        if not isinstance(arg, Tensor) and hasattr(arg, "_type"):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:  # another object, such as a ReduceOp
                continue
    return dist.distributed_c10d._resolve_process_group(args[-1])


def _all_reduce(args: tuple[Any, ...]) -> float:
    size = _group(args).size()
    return 2 * (size - 1) / size * _n_bytes(args[0])


def _rest_of(place: int) -> Callable[[tuple[Any, ...]], float]:
    """Count all but this rank's own part of the whole tensor, which is argument number `place`."""

    def moved(args: tuple[Any, ...]) -> float:
        size = _group(args).size()
        return (size - 1) / size * _n_bytes(args[place])

    return moved


def _gathered(args: tuple[Any, ...]) -> float:
    """Count a functional all-gather, whose argument is this rank's part."""
    return (_group(args).size() - 1) * _n_bytes(args[0])


def _exchanged(sizes_place: int, x_place: int) -> Callable[[tuple[Any, ...]], float]:
    """Count what this rank sends to others in an all-to-all; without sizes, all parts are equal."""
    even = _rest_of(x_place)

    def moved(args: tuple[Any, ...]) -> float:
        sizes = args[sizes_place]
        if not sizes or not sum(sizes):
            return even(args)
        away = 1 - sizes[_group(args).rank()] / sum(sizes)
        return away * _n_bytes(args[x_place])

    return moved


def _unless_root(root_place: int) -> Callable[[tuple[Any, ...]], float]:
    def moved(args: tuple[Any, ...]) -> float:
        return 0.0 if args[root_place] == _group(args).rank() else float(_n_bytes(args[0]))

    return moved


_COLLECTIVES: dict[str, tuple[str, Callable[[tuple[Any, ...]], float]]] = {
    # c10d collectives work in place; torch.distributed's functions and FSDP2 call them. Arguments:
    # (outputs, inputs, group).
    "allreduce_": ("all_reduce", _all_reduce),
    "_allgather_base_": ("all_gather", _rest_of(0)),
    "_reduce_scatter_base_": ("reduce_scatter", _rest_of(1)),
    "alltoall_base_": ("all_to_all", _exchanged(4, 1)),
    "broadcast_": ("broadcast", _unless_root(2)),
    "reduce_": ("reduce", _unless_root(3)),
    # DTensor calls functional collectives. Arguments: (input, ..., name of the group).
    "all_reduce": ("all_reduce", _all_reduce),
    "all_reduce_": ("all_reduce", _all_reduce),
    "all_gather_into_tensor": ("all_gather", _gathered),
    "reduce_scatter_tensor": ("reduce_scatter", _rest_of(0)),
    "all_to_all_single": ("all_to_all", _exchanged(2, 0)),
}


# --------------------------------------------------------------------------- formulas


@dataclass(frozen=True)
class Volume:
    """Elements that a rank moves for one layer's products, without vectors and statistics."""

    forward: float = 0.0
    backward: float = 0.0


def one_dimensional(size: Size, cols: int, recompute: bool) -> Volume:
    """Return the volume of Megatron and its sequence-parallel form: 4(c-1)/c bsh each way.

    The formulas are those of docs/concepts/placement.md.
    """
    forward = 4 * (cols - 1) / cols * _activation(size)
    return Volume(forward, forward * (2 if recompute else 1))


def two_dimensional(
    size: Size, rows: int, cols: int, recompute: bool, output_stationary: bool
) -> Volume:
    """Return the volume of Optimus, which moves twice as much in backward as in forward.

    The formulas are those of docs/concepts/placement.md. If the output of every product stays in
    place, as in the paper (Xu et al. 2021), 7bsh travel; if the narrower of input and output
    travels, 4bsh.
    """
    activations = (cols - 1) / (rows * cols) * (7 if output_stationary else 4) * _activation(size)
    forward = activations + _weights(size, rows, cols)
    return Volume(forward, forward * (3 if recompute else 2))


def sharded(size: Size, rows: int, cols: int, recompute: bool, reshard: bool) -> Volume:
    """Return the volume of FSDP2 over the rows and tensor parallelism over the columns.

    Forward gathers the weights; backward reduce-scatters their gradients, and gathers the weights
    again (once, even with recomputation) if `reshard` freed them in between.
    """
    activations = (cols - 1) / (rows * cols) * 4 * _activation(size)
    weights = _weights(size, rows, cols)
    backward = activations * (2 if recompute else 1) + weights * (2 if reshard else 1)
    return Volume(activations + weights, backward)


def _activation(size: Size) -> int:
    return size.b * size.s * size.h


def _weights(size: Size, rows: int, cols: int) -> float:
    return (rows - 1) / (rows * cols) * 12 * size.h**2
