"""Sums of a parameter's gradients over several backward passes, such as those of a chunked loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gridformer.models.kernels import products
from gridformer.utils.tensor_attribute import TensorAttribute


class GradientSum:
    """The sum of the gradients of one tensor, in at least float32.

    While `summed` is open, a product that reads the tensor may add its gradient here itself, and
    autograd then returns none for it.
    """

    def __init__(self, of: Tensor) -> None:
        self.shape, self.dtype = of.shape, torch.promote_types(of.dtype, torch.float32)
        self._sum: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The sum, to which something was added."""
        assert self._sum is not None, "no gradient was added"
        return self._sum[: self.shape[0]] if self.shape else self._sum

    def add(self, gradient: Tensor) -> None:
        if self._sum is None:  # the sum begins with the first gradient, not with zeros
            self._sum = gradient.to(self.dtype)
        else:
            self.value.add_(gradient)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Adds the gradient a @ b, given its factors.

        `a` may have additional rows, always as many: without them its rows may not have a length
        for which a device has its fast kernels.
        """
        if self._sum is None:
            self._sum = products.wide_product(a, b, self.dtype)
        else:
            products.add_product(self._sum, a, b)


_SUM = TensorAttribute[GradientSum]("gradient_sum")


@contextmanager
def summed(tensors: Sequence[Tensor]) -> Iterator[list[GradientSum]]:
    """Yields an empty sum for each tensor, which the products that read it find in this context."""
    sums = [GradientSum(of) for of in tensors]
    for of, total in zip(tensors, sums):
        _SUM.set(of, total)
    try:
        yield sums
    finally:
        for of in tensors:
            _SUM.remove(of)


def sum_behind(weight: Tensor) -> GradientSum | None:
    """Returns the open sum of a tensor, of which `weight` is the whole or the transpose."""
    of = weight if weight._base is None else weight._base
    total = _SUM.get(of)
    return total if of.numel() == weight.numel() else None
