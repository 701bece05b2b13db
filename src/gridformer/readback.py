"""Numbers that the host reads back from tensors, while it decides what a step does next.

Fake tensors (gridformer.memory) have shapes and no numbers: ones are read from them, with which a
step goes its ordinary way.
"""

from __future__ import annotations

from torch import Tensor


def has_numbers(x: Tensor) -> bool:
    """Whether there is anything in its memory."""
    from torch._subclasses.fake_tensor import FakeTensor  # takes time, of who only plans a run

    return not isinstance(x, FakeTensor)


def numbers(x: Tensor) -> list[float]:
    """Those of a vector."""
    if not has_numbers(x):
        return [1.0] * x.numel()
    found: list[float] = x.tolist()
    return found
