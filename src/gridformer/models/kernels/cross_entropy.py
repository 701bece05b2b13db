"""The cross entropy of logits as they are, with their gradient in their place.

Two kernels read the logits, which are in half precision where products are, and the second one
writes. PyTorch's operators cast them to float32, keep logarithms or exponentials as large, and read
or write these six times more, ten where a vocabulary is sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gridformer.models.kernels.library import LIBRARY, define
from gridformer.utils.batch import IGNORE

_WORDS = "int first, int n_words, float share, float spread"
define(f"loss_terms(Tensor logits, Tensor targets, {_WORDS}) -> Tensor")
define(
    "loss_gradient(Tensor(a!) logits, Tensor targets, Tensor norms, Tensor factors, "
    f"{_WORDS}) -> ()"
)
# Sums the terms of all devices that shard a vocabulary.
Combine = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class Words(NamedTuple):
    """Which words the columns of logits are, and how targets count.

    Attributes:
        first: The word of the first column.
        n_words: How many columns are words; others are padding.
        share: What the target's logit counts, 1 without label smoothing.
        spread: What every logit counts besides, 0 without label smoothing.
    """

    first: int
    n_words: int
    share: float
    spread: float


def cross_entropy(
    logits_TV: Tensor,
    targets_T: Tensor,
    words: Words,
    combine: Combine | None = None,
    mine: slice = slice(None),
) -> Tensor:
    """Returns the sum of the cross entropies of some tokens, in float32, differentiable.

    Its backward pass overwrites the logits, for which `library.available` is true.

    Args:
        logits_TV: Rows of this device's columns, contiguous.
        targets_T: Words; `IGNORE` counts nothing.
        combine: Turns this device's terms of each token into those of the whole vocabulary: the
            largest logit, the sum of exp(logit - largest), and the logits that targets count.
        mine: The tokens that are summed.
    """
    assert logits_TV.is_contiguous()
    loss: Tensor = _CrossEntropy.apply(logits_TV, targets_T, words, combine, mine)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        words: Words,
        combine: Combine | None,
        mine: slice,
    ) -> Tensor:
        terms = torch.ops.gridformer.loss_terms(logits_TV, targets_T, *words).unbind()
        top_T, total_T, target_T = combine(*terms) if combine else terms
        norm_T, counts_T = top_T + total_T.log(), targets_T != IGNORE
        ctx.save_for_backward(logits_TV, targets_T, norm_T, counts_T)
        ctx.words = words
        return ((norm_T - target_T) * counts_T)[mine].sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits_TV, targets_T, norm_T, counts_T = ctx.saved_tensors
        factor_T = counts_T * grads[0]
        torch.ops.gridformer.loss_gradient(logits_TV, targets_T, norm_T, factor_T, *ctx.words)
        # Autograd refuses a second backward pass, and other nodes that have saved the logits.
        torch.autograd.graph.increment_version(logits_TV)
        return logits_TV, *[None] * 4


def empty_terms(logits_TV: Tensor) -> Tensor:
    """Returns a tensor for three numbers of each token, at least float32 [3, T]."""
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    return logits_TV.new_empty(3, len(logits_TV), dtype=dtype)


@torch.library.impl(LIBRARY, "loss_terms", "CUDA")
def _(logits: Tensor, *rest: Any) -> Tensor:
    from gridformer.models.kernels import softmax

    with torch.cuda.device(logits.device):
        return softmax.launch_terms(logits, *rest)


@torch.library.impl(LIBRARY, "loss_gradient", "CUDA")
def _(logits: Tensor, *rest: Any) -> None:
    from gridformer.models.kernels import softmax

    with torch.cuda.device(logits.device):
        softmax.launch_gradient(logits, *rest)


@torch.library.register_fake("gridformer::loss_terms", lib=LIBRARY)
def _(logits: Tensor, *rest: Any) -> Tensor:
    return empty_terms(logits)


@torch.library.register_fake("gridformer::loss_gradient", lib=LIBRARY)
def _(logits: Tensor, *rest: Any) -> None:
    return None
