"""Gradients of weights as GPUs can compute them: factors in half precision, a result in float32.

A product sums in float32 anyway. Rounding its result to the type of the factors, casting it to the
weight's type and adding it to a sum reads and writes a matrix as large as the weight five times;
adding it where the product is computed does so twice, and it needs no memory in between. With few
tokens in a micro-batch, or with the table of a large vocabulary, to whose gradient every chunk of
the loss adds, this is a noticeable part of the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gridformer.models.kernels import library
from gridformer.models.kernels.library import LIBRARY, define

define("add_product(Tensor(a!) total, Tensor a, Tensor b) -> ()")
define("write_product(Tensor(a!) out, Tensor a, Tensor b) -> ()")


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a @ b of matrices a [m, k] and b [k, n] in a type at least as wide as theirs."""
    if _in_float32(a, dtype):
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).to(dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b of matrices a [m, k] and b [k, n] to `total` [m, n], in the type of `total`."""
    if _in_float32(a, total.dtype):
        torch.ops.gridformer.add_product(total, a, b)
    elif a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def write_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Writes a @ b of matrices a [m, k] and b [k, n] to `out` [m, n], in the type of `out`."""
    if _in_float32(a, out.dtype):
        torch.ops.gridformer.write_product(out, a, b)
    elif a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def _in_float32(a: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether the device writes a product of matrices like `a` in float32."""
    return (
        dtype == torch.float32
        and a.dtype in (torch.bfloat16, torch.float16)
        and library.available(a.device, a.dtype)
    )


@torch.library.impl(LIBRARY, "add_product", "CUDA")
def _(total: Tensor, a: Tensor, b: Tensor) -> None:
    torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


@torch.library.register_fake("gridformer::add_product", lib=LIBRARY)
def _(total: Tensor, a: Tensor, b: Tensor) -> None:
    return None


@torch.library.impl(LIBRARY, "write_product", "CUDA")
def _(out: Tensor, a: Tensor, b: Tensor) -> None:
    # What `out` holds does not count where beta is 0.
    torch.addmm(out, a, b, beta=0, out_dtype=torch.float32, out=out)


@torch.library.register_fake("gridformer::write_product", lib=LIBRARY)
def _(out: Tensor, a: Tensor, b: Tensor) -> None:
    return None
