"""Sums of a weight's gradients over several backward passes, to which products add their results.

Such passes are those of the chunks of a loss (`summed`), and those of the micro-batches of a step
(`added_in_products`). A product that finds a sum adds to it where it multiplies, instead of leaving
that to autograd. In bfloat16 and float16 autograd would round the gradient, cast it to float32 and
add it, which reads and writes a matrix as large as the weight five times more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gridformer.models.blocks.cast import parameter_behind
from gridformer.models.kernels import products
from gridformer.utils.tensors import TensorAttribute
from gridformer.utils.torch_private import base_of


class GradientSum:
    """The sum of the gradients of one tensor, in at least float32.

    While `summed` is open, a product that reads the tensor may add its gradient here itself, and
    autograd then returns none for it.

    Args:
        shape: The shape of the sum in memory.
        begin: A sum to which gradients are added, contiguous; None if there is none yet.
        elements: How many elements the memory of the sum has, if more than the sum.
        turned: Whether the sum lies in the order of the transpose of the gradients.

    Attributes:
        begun: Whether something was added.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        begin: Tensor | None = None,
        elements: int = 0,
        turned: bool = False,
    ) -> None:
        self.shape, self.dtype = torch.Size(shape), torch.promote_types(dtype, torch.float32)
        self._sum, self._turned = begin, turned
        self._elements = elements if elements > self.shape.numel() else 0
        self.begun = False

    @property
    def value(self) -> Tensor:
        """The sum, to which something was added, in the shape of the gradients."""
        assert self._sum is not None, "no gradient was added"
        more = self.shape and len(self._sum) > self.shape[0]
        value = self._sum[: self.shape[0]] if more else self._sum
        return value.t() if self._turned else value

    def add(self, gradient: Tensor) -> None:
        self.begun = True
        if self._sum is not None:
            self.value.add_(gradient)
            return
        gradient = gradient.t() if self._turned else gradient
        if self._elements and gradient.dtype != self.dtype:
            self._sum = self._memory(gradient).copy_(gradient)
        else:  # the sum begins with the first gradient, not with zeros
            self._sum = gradient.to(self.dtype)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Adds the gradient a @ b, given its factors.

        `a` may have additional rows, the same number in every call. They pad a dimension to a size
        for which a device has fast kernels.
        """
        self.begun = True
        if self._turned:
            a, b = b.t(), a.t()
        if self._sum is not None:
            products.add_product(self._sum, a, b)
        elif self._elements:
            self._sum = self._memory(a)
            products.write_product(self._sum, a, b)
        else:
            self._sum = products.wide_product(a, b, self.dtype)

    def _memory(self, like: Tensor) -> Tensor:
        memory = like.new_empty(self._elements, dtype=self.dtype)
        return memory[: self.shape.numel()].view(self.shape)


_SUM = TensorAttribute[GradientSum]("gradient_sum")


@contextmanager
def summed(tensors: Sequence[Tensor]) -> Iterator[list[GradientSum]]:
    """Yields an empty sum for each tensor, which the products that read it find in this context."""
    sums = [GradientSum(of.shape, of.dtype) for of in tensors]
    for of, total in zip(tensors, sums):
        _SUM.set(of, total)
    try:
        yield sums
    finally:
        for of in tensors:
            _SUM.remove(of)


def sum_behind(weight: Tensor) -> GradientSum | None:
    """Returns the open sum of the tensor that `weight` is, or whose transpose it is."""
    of = base_of(weight)
    total = _SUM.get(of)
    return total if of.numel() == weight.numel() else None


@dataclass
class GradientSlot:
    """What products know about the gradient of a weight: the elements that its memory has.

    Products add to the gradient of earlier backward passes if `continued` is set.
    """

    elements: int
    continued: bool = False


_SLOT = TensorAttribute[GradientSlot]("gradient_slot")


def gradient_slot(parameter: Tensor) -> GradientSlot | None:
    """Returns the slot of a parameter's gradient, if products may add to it."""
    return _SLOT.get(parameter)


def attach_gradient_slots(model: nn.Module) -> None:
    """Attaches a `GradientSlot` to the weights that modules name in `summed_parameters`."""
    for module in model.modules():
        for name in getattr(module, "summed_parameters", ()):
            parameter = getattr(module, name)
            if parameter is not None:
                _SLOT.set(parameter, GradientSlot(parameter.numel()))


def continued(weight: Tensor) -> GradientSum | None:
    """Takes the gradient that earlier backward passes have left, for a product that adds to it.

    It is that of a parameter or its transpose, and the product returns its `value`: autograd stores
    that as the new one without a copy, since nothing else refers to it. The result is None if
    autograd is to add the gradient, for instance because `GradientSlot.continued` is false or a
    chunk of a loss wants its own.
    """
    parameter = parameter_behind(weight)
    if parameter is None:
        return None
    slot = _SLOT.get(parameter)
    if slot is None or not slot.continued or _SUM.get(parameter) is not None:
        return None
    # The parameter may have no memory (FSDP), so nothing takes a view of it.
    by_columns, begin = not parameter.is_contiguous(), parameter.grad
    if begin is not None:
        begin = begin.t() if by_columns else begin
        if not begin.is_contiguous():
            return None
        parameter.grad = None
    shape = parameter.shape[::-1] if by_columns else parameter.shape
    turned = (weight is parameter) == by_columns
    return GradientSum(shape, parameter.dtype, begin, slot.elements, turned)


def added_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Returns a gradient of a parameter, added to that of earlier micro-batches if possible."""
    total = continued(parameter)
    if total is None:
        return gradient.to(parameter.dtype)
    total.add(gradient)
    return total.value
