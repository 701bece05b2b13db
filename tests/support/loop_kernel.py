"""A kernel with a loop, and nothing of ours: what an interpreter of kernels must be able to run."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _count(out: Any, n: Any) -> None:
    for i in range(0, n):
        tl.store(out + i, i)


def counts() -> bool:
    """Return whether Triton runs the loop here; 3.6's interpreter cannot with numpy 2.4 or 2.5."""
    out = torch.zeros(3, dtype=torch.int32)
    try:
        _count[(1,)](out, 3)
    except InterpreterError as error:
        if "0-dimensional arrays" in str(error):
            return False
        raise
    return out.tolist() == [0, 1, 2]
