"""Typed attributes of tensors: the one way in which gridformer notes something on a tensor."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

from torch import Tensor

T = TypeVar("T")


class TensorAttribute(Generic[T]):
    """An attribute that may be set on any tensor, with values of one type.

    Each is a constant of the module that it belongs to, so `git grep TensorAttribute` lists all
    that gridformer notes on tensors.

    Args:
        name: The name of the attribute, which no other has.
    """

    def __init__(self, name: str) -> None:
        self._name = f"_gridformer_{name}"

    def get(self, tensor: Tensor) -> T | None:
        """Returns the value that was set on a tensor, or None."""
        return cast("T | None", getattr(tensor, self._name, None))

    def set(self, tensor: Tensor, value: T) -> None:
        """Sets the value on a tensor, instead of the one that it may have."""
        setattr(tensor, self._name, value)

    def remove(self, tensor: Tensor) -> None:
        """Removes the value from a tensor that has one."""
        delattr(tensor, self._name)
