"""Copies of float32 parameters in the type of the computation, in which products read them.

Activations in bfloat16 or float16 need weights of the same type, while updates need them in
float32. Every product therefore asks `cast` for its weight. Between `keep_copies` and its end a
parameter is cast once, whatever the number of micro-batches, recomputations and chunks of a loss
that read it; elsewhere it is cast at each use. Gradients always belong to the float32 parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gridformer.utils.tensors import TensorAttribute
from gridformer.utils.torch_private import base_of

# GPUs multiply blocks of this many columns. With 50,257 words instead of 50,304, a multiple of it,
# the product of a head ran at 100 instead of 640 TFLOP/s on an H100 (docs/results/gpu.md).
ROWS_OF_TABLE = 64


class CastCopy:
    """The copy of one parameter.

    Attributes:
        once: Whether the copy is kept from its first use on while `keep_copies` is open.
        multiple: The number of rows of the copy is rounded up to a multiple of this, with zeros.
        held: Whether a copy that is made now is kept.
        value: The copy, with its additional rows; None while there is none.
        together: The tensor in which copies that are kept lie side by side, if there is one.
    """

    def __init__(self, dtype: torch.dtype, once: bool = True, multiple: int = 1) -> None:
        self.dtype, self.once, self.multiple = dtype, once, multiple
        self.held = False
        self.value: Tensor | None = None
        self.together: CopiesTogether | None = None

    def of(self, parameter: Tensor) -> Tensor:
        """Returns the copy, which is made now if there is none."""
        if self.value is not None:
            return self.value
        if self.held and self.together is not None:
            self.value = self.together.place(self, parameter)
            self.value.copy_(_readable(parameter))
            return self.value
        made = self._made(_readable(parameter))
        if self.held:
            self.value = made
        return made

    def allocate(self, parameter: Tensor) -> Tensor:
        """Allocates the copy, for a caller that fills it, and returns it."""
        if self.together is not None:
            self.value = self.together.place(self, parameter)
        else:
            self.value = torch.empty_like(parameter, dtype=self.dtype, requires_grad=False)
        return self.value

    def rows(self, rows: int) -> int:
        """Returns the number of rows of the copy of a parameter that has `rows`."""
        return -(-rows // self.multiple) * self.multiple

    def drop(self) -> None:
        """Frees the copy, for instance because the parameter has been updated."""
        self.value = None
        if self.together is not None:
            self.together.drop_unused()

    def _made(self, parameter: Tensor) -> Tensor:
        rows, padded = len(parameter), self.rows(len(parameter))
        if padded == rows:
            return parameter.to(self.dtype)
        made = parameter.new_empty((padded, *parameter.shape[1:]), dtype=self.dtype)
        made[:rows] = parameter
        made[rows:] = 0
        return made


class CopiesTogether:
    """The copies of parameters that one product reads side by side: one tensor [.., sum of n]."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._copies = [copy for p in parameters if (copy := copy_of(p)) is not None]
        self._ends = [0]
        for parameter, copy in zip(parameters, self._copies, strict=True):
            self._ends.append(self._ends[-1] + parameter.shape[-1])
            copy.together = self
        self._value: Tensor | None = None

    def of(self, parameters: Sequence[Tensor]) -> Tensor:
        """Returns all copies, and makes those that are missing."""
        if not all(copy.held or copy.value is not None for copy in self._copies):
            return _joined(parameters, self._copies[0].dtype)
        for copy, parameter in zip(self._copies, parameters, strict=True):
            copy.of(parameter)
        assert self._value is not None
        return self._value

    def place(self, copy: CastCopy, parameter: Tensor) -> Tensor:
        """Returns the part of the tensor that belongs to one copy, allocated if it is not."""
        if self._value is None:
            shape = (*parameter.shape[:-1], self._ends[-1])
            self._value = parameter.new_empty(shape, dtype=copy.dtype, requires_grad=False)
        index = self._copies.index(copy)
        return self._value[..., self._ends[index] : self._ends[index + 1]]

    def drop_unused(self) -> None:
        """Frees the tensor if no copy is left in it."""
        if all(copy.value is None for copy in self._copies):
            self._value = None


_COPY = TensorAttribute[CastCopy]("cast_copy")
_STANDS_FOR = TensorAttribute[Sequence[Tensor]]("stands_for")
_TRANSPOSE_OF = TensorAttribute[Tensor]("transpose_of")


def stand_for(place: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Makes a tensor the placeholder of parameters side by side, which `cast` reads. Returns it."""
    _STANDS_FOR.set(place, parameters)
    return place


def stands_for_parameters(weight: Tensor) -> bool:
    """Whether `stand_for` was called on a tensor; then only `cast` knows its values."""
    return _STANDS_FOR.get(weight) is not None


def transposed(parameter: Tensor) -> Tensor:
    """Returns the transpose [n, m] of a parameter [m, n] for a product, which reads it by `cast`.

    Torch makes no views of a parameter that FSDP has freed, since only its copies are gathered. So
    the result then has no values; but it is differentiable, and `cast` finds the copy.
    """
    if not parameter.numel() or parameter.untyped_storage().nbytes():
        return parameter.t()
    place: Tensor = _Transposed.apply(parameter)
    _TRANSPOSE_OF.set(place, parameter)
    return place


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return parameter.new_empty(()).expand(parameter.shape[1], parameter.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        return None if grads[0] is None else grads[0].t()


def _joined(parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns parameters, or transposes of them, side by side in a new tensor."""
    read = [_readable(p) if p.is_leaf else cast(p, dtype).detach() for p in parameters]
    if all(parameter.dtype == dtype for parameter in read):
        return torch.cat(read, -1)
    widths = [parameter.shape[-1] for parameter in read]
    made = read[0].new_empty((*read[0].shape[:-1], sum(widths)), dtype=dtype)
    for place, parameter in zip(made.split(widths, -1), read):
        place.copy_(parameter)
    return made


def _readable(parameter: Tensor) -> Tensor:
    """Returns a parameter without its graph, after checking that it is in memory."""
    if parameter.numel() and not parameter.untyped_storage().nbytes():
        raise RuntimeError("a parameter that is sharded over replicas was read, not gathered")
    return parameter.detach()


def cast(weight: Tensor, dtype: torch.dtype, padded: bool = False) -> Tensor:
    """Returns a weight in another type, without a graph: the copy of this step if one is kept.

    A weight of that type is returned as it is.

    Args:
        weight: A parameter, the transpose of one (`transposed`), or the placeholder of several
            (`stand_for`).
        padded: Whether the result may have the additional rows of the copy, or columns if `weight`
            is a transpose. They are zero.
    """
    several = _STANDS_FOR.get(weight)
    if several is not None:
        copy = copy_of(several[0])
        if copy is None or copy.dtype != dtype or copy.together is None:
            return _joined(several, dtype)
        return copy.together.of(several)
    if weight.dtype == dtype:
        return weight
    behind = _copy_behind(weight, dtype)
    if behind is None:
        return weight.detach().to(dtype)
    parameter, copy = behind
    value = copy.of(parameter)
    value = value if padded else value[: len(parameter)]
    return value if _is_alike(weight, parameter) else value.t()


def make_copies(parameters: Iterable[Tensor]) -> None:
    """Makes the copies that are kept, of parameters that are in memory, with as few kernels as can.

    A parameter whose copy has additional rows, or lies beside others, needs a kernel of its own.
    """
    copies: list[Tensor] = []
    read: list[Tensor] = []
    for parameter in parameters:
        copy = copy_of(parameter)
        if copy is None or not copy.held or not parameter.untyped_storage().nbytes():
            continue
        alone = copy.together is not None or copy.rows(len(parameter)) > len(parameter)
        if alone or copy.value is not None:
            copy.of(parameter)
        else:
            copies.append(copy.allocate(parameter))
            read.append(parameter.detach())
    if copies:
        torch._foreach_copy_(copies, read)


def padded_columns(weight_IO: Tensor, dtype: torch.dtype) -> int:
    """Returns the number of columns of `cast(weight_IO, dtype, padded=True)`."""
    behind = _copy_behind(weight_IO, dtype)
    if behind is None or _is_alike(weight_IO, behind[0]):
        return weight_IO.shape[1]
    return behind[1].rows(weight_IO.shape[1])


def parameter_behind(weight: Tensor) -> Tensor | None:
    """Returns the parameter that `weight` is, or whose transpose it is; None if it is neither."""
    turned = _TRANSPOSE_OF.get(weight)
    if turned is not None:
        return turned
    parameter = base_of(weight)
    if parameter is weight:
        return weight if weight.is_leaf else None
    # FSDP may have freed the parameter, and torch makes no views of it then.
    shape, stride = parameter.shape, parameter.stride()
    if (weight.shape, weight.stride()) in ((shape, stride), (shape[::-1], stride[::-1])):
        return parameter
    return None  # a part of it


def _copy_behind(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, CastCopy] | None:
    """Returns a parameter and its copy, if `weight` is the parameter or its transpose."""
    if weight.dtype == dtype:
        return None
    parameter = parameter_behind(weight)
    copy = None if parameter is None else copy_of(parameter)
    if parameter is None or copy is None or copy.dtype != dtype:
        return None
    return parameter, copy


def _is_alike(weight: Tensor, other: Tensor) -> bool:
    """Returns whether two views of the same memory are the same view."""
    return weight.shape == other.shape and weight.stride() == other.stride()


def copy_of(parameter: Tensor) -> CastCopy | None:
    """Returns the copy of a parameter, or None if no product reads it in another type."""
    return _COPY.get(parameter)


def attach_copies(model: nn.Module, dtype: torch.dtype, once: bool) -> None:
    """Attaches a `CastCopy` to each parameter that products of a model read in another type.

    A module names these parameters in its attribute `cast_parameters`. With `cast_multiple` it asks
    for additional rows, see `CastCopy`. Its method `cast_together` returns those of other modules
    that it reads side by side, see `CopiesTogether`.
    """
    for module in model.modules():
        for name in getattr(module, "cast_parameters", ()):
            parameter = getattr(module, name)
            if parameter is not None and parameter.dtype != dtype:
                multiple = getattr(module, "cast_multiple", 1)
                _COPY.set(parameter, CastCopy(dtype, once, multiple))
    for module in model.modules():
        for together in getattr(module, "cast_together", list)():
            if all(copy_of(parameter) is not None for parameter in together):
                CopiesTogether(together)


@contextmanager
def keep_copies(parameters: Iterable[Tensor], once: bool = True) -> Iterator[None]:
    """Keeps copies from their first use until the end of this context.

    Code that changes a parameter inside the context must call `CastCopy.drop`. With `once` only the
    copies of parameters that are to be cast once a step are kept, and otherwise all of them.
    """
    copies = [copy for parameter in parameters if (copy := copy_of(parameter)) is not None]
    mine = [copy for copy in copies if not copy.held and (copy.once or not once)]
    for copy in mine:
        copy.held = True
    try:
        yield
    finally:
        for copy in mine:
            copy.held = False
            copy.drop()
