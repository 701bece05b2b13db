"""The operator of dropout: one kernel, which computes the mask in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from gridformer.models.kernels.library import LIBRARY, define, signed

define(
    "masked(Tensor x, int key, int first_sample, int first_token, int first_column, float p)"
    " -> Tensor"
)


def masked(
    x_BSH: Tensor, key: int, first_sample: int, first_token: int, first_column: int, p: float
) -> Tensor:
    """Zeroes elements of x with probability p and multiplies the others by 1 / (1 - p).

    It keeps nothing for backward, which calls it again with the gradient.

    Args:
        x_BSH: Activations [b, s, h] for which `library.available` is true.
        key: The 64-bit key of the mask; see `gridformer.utils.rng`.
        first_sample: The global index of the first sequence.
        first_token: The index of the first token within its sequence.
        first_column: The index of the first column.
        p: The probability of zeroing an element, below 1.

    Returns:
        [b, s, h], contiguous, with the bits that `gridformer.models.blocks.dropout.Mask` computes
        without a kernel.
    """
    out: Tensor = torch.ops.gridformer.masked(
        x_BSH, signed(key, 64), first_sample, first_token, first_column, p
    )
    return out


@torch.library.impl(LIBRARY, "masked", "CUDA")
def _(x: Tensor, key: int, sample: int, token: int, column: int, p: float) -> Tensor:
    from gridformer.models.kernels import masking

    with torch.cuda.device(x.device):
        return masking.masked(x, key, sample, token, column, p)


@torch.library.register_fake("gridformer::masked", lib=LIBRARY)
def _(x: Tensor, key: int, sample: int, token: int, column: int, p: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
