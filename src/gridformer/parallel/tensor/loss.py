"""Cross entropy of logits whose vocabulary is sharded over an axis, without gathering the logits.

Shoeybi et al. 2019, section 3; Optimus, section 3.2.3. Unlike the Optimus paper it subtracts the
maximum over the row of devices, and it has the exponential that the paper's gradient formula lacks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.mesh import Axis
from gridformer.models.blocks import IGNORE
from gridformer.models.kernels import library
from gridformer.models.kernels.cross_entropy import Words, cross_entropy

_LABEL = "loss"


class VocabParallelCrossEntropy(nn.Module):
    """Cross entropy of logits [b, s, V/size], summed over tokens; V is the padded vocabulary.

    Rank k of `axis` holds the logits of words k*V/size to (k+1)*V/size - 1; padding does not count.
    Targets [b, s] equal to `IGNORE` contribute zero. Forward all-reduces three numbers of each
    token: the maximum, and together the sum of exponentials and the target's logit (with label
    smoothing, the logits weighted by the smoothed target). Backward sends nothing.

    Args:
        vocab_size: True size of the vocabulary.
        width: V/size, if the logits may have additional columns, which are left out.
        axes: The axes that shard the vocabulary, the innermost first, if there are several.
        samples: If the logits are those of the samples of all ranks of an axis, that axis. The
            result is then the sum over this rank's samples, those of its targets.
    """

    def __init__(
        self,
        axis: Axis,
        vocab_size: int,
        smoothing: float = 0.0,
        width: int | None = None,
        axes: tuple[Axis, ...] = (),
        samples: Axis | None = None,
    ) -> None:
        super().__init__()
        self.axis, self.vocab_size, self.smoothing = axis, vocab_size, smoothing
        self.width, self.axes = width, axes or (axis,)
        self.samples = samples or Axis("samples")
        self.fused = True

    def forward(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        columns, n_mine = logits_BSV.shape[-1], targets_BS.numel()
        first = self.samples.index * n_mine
        if self.fused and library.available(logits_BSV.device, logits_BSV.dtype):
            mine, targets_T = slice(first, first + n_mine), self.of_all(targets_BS).flatten()
            logits_TV = logits_BSV.reshape(-1, columns).contiguous()
            return cross_entropy(logits_TV, targets_T, self._words(columns), self._combine, mine)
        out: Tensor = _VocabParallelCrossEntropy.apply(
            logits_BSV.reshape(-1, columns),
            self.of_all(targets_BS).flatten(),
            self.axis,
            self.vocab_size,
            self.smoothing if self.training else 0.0,
            columns if self.width is None else self.width,
            slice(first, first + n_mine),
        )
        return out

    def _words(self, columns: int) -> Words:
        """Returns what `columns` of this rank's logits are."""
        width = columns if self.width is None else self.width
        first, smoothing = self.axis.index * width, self.smoothing * self.training
        n_words = min(max(0, self.vocab_size - first), width)
        return Words(first, n_words, 1.0 - smoothing, smoothing / self.vocab_size)

    def _combine(
        self, top_T: Tensor, sum_T: Tensor, target_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the terms of the whole vocabulary; `sum_T` is relative to the largest logit."""
        highest_T = comm.all_reduce(top_T.clone(), self.axis, "max", _LABEL)
        both_2T = torch.stack((sum_T * (top_T - highest_T).exp(), target_T))
        sum_T, target_T = comm.all_reduce(both_2T, self.axis, label=_LABEL)
        return highest_T, sum_T, target_T

    def of_all(self, targets_BS: Tensor) -> Tensor:
        """Returns the targets of all samples of the logits, given those of this rank's."""
        return comm.all_gather(targets_BS, self.samples, 0, "tokens")

    def of_mine(self, x: Tensor) -> Tensor:
        """Returns the part of x [b, ..] that belongs to this rank's samples."""
        return x.chunk(self.samples.size)[self.samples.index]

    def whole(self, logits_BSV: Tensor, label: str) -> Tensor:
        """Returns the logits of the padded vocabulary, for this rank's samples."""
        logits = logits_BSV if self.width is None else logits_BSV[..., : self.width]
        for axis in self.axes:
            logits = comm.all_gather(logits, axis, -1, label)
        return self.of_mine(logits)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        axis: Axis,
        vocab_size: int,
        smoothing: float,
        width: int,
        mine: slice,
    ) -> Tensor:
        first = axis.index * width
        dtype = torch.promote_types(logits_TV.dtype, torch.float32)
        x_TV = logits_TV[:, :width].to(dtype, copy=True)
        n_words = min(max(0, vocab_size - first), x_TV.shape[1])  # the rest is padding
        if n_words < x_TV.shape[1]:
            x_TV[:, n_words:] = -torch.inf

        top_T = comm.all_reduce(x_TV.amax(1), axis, "max", _LABEL)
        x_TV -= top_T.unsqueeze(1)
        counts = targets_T != IGNORE
        here = (targets_T >= first) & (targets_T < first + x_TV.shape[1])  # IGNORE is below 0
        column_T = torch.where(here, targets_T - first, 0)
        target_T = x_TV.gather(1, column_T.unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0)
        if smoothing:
            spread_T = x_TV[:, :n_words].sum(1) * (smoothing / vocab_size)
            target_T = target_T * (1.0 - smoothing) + spread_T
        exp_TV = x_TV.exp_()
        both_2T = torch.stack((exp_TV.sum(1), target_T))
        sum_T, target_T = comm.all_reduce(both_2T, axis, label=_LABEL)

        softmax_TV = exp_TV.div_(sum_T.unsqueeze(1))
        ctx.save_for_backward(softmax_TV, column_T, here, counts)
        ctx.shape, ctx.dtype, ctx.n_words = logits_TV.shape, logits_TV.dtype, n_words
        ctx.share, ctx.spread = 1.0 - smoothing, smoothing / vocab_size
        return ((sum_T.log() - target_T) * counts)[mine].sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # The saved tensor becomes the gradient; autograd refuses a second backward pass. The
        # gradient of every rank's sum is the same, and so it is that of all samples.
        grad_TV, column_T, here, counts = ctx.saved_tensors
        if ctx.spread:
            grad_TV[:, : ctx.n_words] -= ctx.spread
        at_target = here.to(grad_TV.dtype).mul_(-ctx.share).unsqueeze(1)
        grad_TV.scatter_add_(1, column_T.unsqueeze(1), at_target)
        grad_TV.mul_((counts * grads[0]).unsqueeze(1))
        if grad_TV.shape == ctx.shape:
            return grad_TV.to(ctx.dtype), *[None] * 6
        width = grad_TV.shape[1]
        cast_TV = grad_TV.new_empty(ctx.shape, dtype=ctx.dtype)
        cast_TV[:, :width] = grad_TV
        cast_TV[:, width:] = 0
        return cast_TV, *[None] * 6
