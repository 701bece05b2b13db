"""Products of sorted rows with one matrix for each group of them, as experts compute them.

On GPUs that is one kernel for all groups, elsewhere one product a group. Sizes of groups are data
on the device: `ends` holds where each group ends, int32 [E]. `grouped_product` returns x[i] w[e]
[S, N] of rows x [S, K] of groups e and matrices w [E, K, N].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.models.kernels.library import LIBRARY, define

define("grouped_product(Tensor x, Tensor w, Tensor ends) -> Tensor")
define("grouped_sum(Tensor x, Tensor y, Tensor ends) -> Tensor")
define("sizes_on_host(Tensor sizes, Tensor arrive, int rows, int experts) -> int[]")
grouped_product = torch.ops.gridformer.grouped_product
grouped_sum = torch.ops.gridformer.grouped_sum
sizes_on_host = torch.ops.gridformer.sizes_on_host


def _in_one_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16


@torch.library.impl(LIBRARY, "grouped_product", "CompositeExplicitAutograd")
def _(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    if _in_one_kernel(x):
        return F.grouped_mm(x, w, offs=ends)
    y, start = x.new_empty(len(x), w.shape[2]), 0
    for e, end in enumerate(ends.tolist()):
        torch.mm(x[start:end], w[e], out=y[start:end])
        start = end
    return y


@torch.library.register_fake("gridformer::grouped_product", lib=LIBRARY)
def _(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(x), w.shape[2])


@torch.library.impl(LIBRARY, "grouped_sum", "CompositeExplicitAutograd")
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """The sum over rows of x [S, K] and y [S, N] of each group: [E, K, N]."""
    if _in_one_kernel(x):
        return F.grouped_mm(x.t(), y, offs=ends)
    total, start = x.new_empty(len(ends), x.shape[1], y.shape[1]), 0
    for e, end in enumerate(ends.tolist()):
        torch.mm(x[start:end].t(), y[start:end], out=total[e])
        start = end
    return total


@torch.library.register_fake("gridformer::grouped_sum", lib=LIBRARY)
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(ends), x.shape[1], y.shape[1])


@torch.library.impl(LIBRARY, "sizes_on_host", "CompositeExplicitAutograd")
def _(sizes: Tensor, arrive: Tensor, rows: int, experts: int) -> list[int]:
    """Reads how many rows go to and come from each device, int64 [2, devices], and other numbers.

    `arrive` says how many come to each device that has parts of the same experts. For a record,
    whose tensors have no values, `rows` go out, to so many `experts`.
    """
    numbers: list[int] = torch.cat((sizes.flatten(), arrive)).tolist()
    return numbers
