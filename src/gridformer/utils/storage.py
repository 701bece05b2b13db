"""Memory of tensors that is freed and allocated again while the tensors, and views of them, stay.

Operators do not show this, so logs of memory listen here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

listeners: list[Callable[[torch.UntypedStorage], object]] = []  # are told what was resized


def free_storage(x: Tensor) -> None:
    """Frees the memory of a tensor.

    The tensor, and its views that autograd has saved, are valid again when the storage has been
    allocated (`allocate_storage`) and filled.
    """
    _resize(x, 0)


def allocate_storage(x: Tensor) -> None:
    """Allocates uninitialized memory for a tensor whose storage was freed."""
    _resize(x, x.numel() * x.element_size())


def _resize(x: Tensor, n_bytes: int) -> None:
    storage = x.untyped_storage()
    storage.resize_(n_bytes)
    for listener in listeners:
        listener(storage)
