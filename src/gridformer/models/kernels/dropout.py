"""The operator of dropout: one kernel, which computes the mask in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from gridformer.models.kernels.library import LIBRARY, define

define("masked(Tensor x, Tensor counter, int first_token, int first_column, float p) -> Tensor")


def masked(x_BSH: Tensor, counter: Tensor, first_token: int, first_column: int, p: float) -> Tensor:
    """Zeroes elements of x with probability p and multiplies the others by 1 / (1 - p).

    It keeps nothing for backward, which calls it again with the gradient.

    Args:
        x_BSH: Activations [b, s, h] for which `library.available` is true.
        counter: What the mask depends on, int64 [4] on the device of x: the halves of its key (see
            `gridformer.utils.rng`), the global index of the first sequence, and a number that is
            not read.

    Returns:
        [b, s, h], contiguous, with the bits that `gridformer.models.blocks.dropout.masked` computes
        without a kernel.
    """
    out: Tensor = torch.ops.gridformer.masked(x_BSH, counter, first_token, first_column, p)
    return out


@torch.library.impl(LIBRARY, "masked", "CUDA")
def _(x: Tensor, counter: Tensor, token: int, column: int, p: float) -> Tensor:
    from gridformer.models.kernels import masking

    with torch.cuda.device(x.device):
        return masking.launch_masking(x, counter, token, column, p)


@torch.library.register_fake("gridformer::masked", lib=LIBRARY)
def _(x: Tensor, counter: Tensor, token: int, column: int, p: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
