"""A kernel with a loop, and nothing of ours: what an interpreter of kernels must be able to run."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _count(out: Any, n: Any) -> None:
    for i in range(0, n):
        tl.store(out + i, i)


def counts() -> bool:
    """Return whether Triton runs the loop here; its interpreter up to 3.6 cannot with numpy 2.5."""
    out = torch.zeros(3, dtype=torch.int32)
    try:
        _count[(1,)](out, 3)
    except TypeError:
        return False
    return out.tolist() == [0, 1, 2]
