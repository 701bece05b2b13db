"""Losses as sums over targets: sums of parts add up to the whole's, so the trainer divides once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.utils.batch import IGNORE


class CrossEntropy(nn.Module):
    """Sum (not mean) of the cross entropy over targets that are not IGNORE, in at least float32.

    smoothing: the share of each target that is spread evenly over the vocabulary, in training
    (Vaswani et al. 2017, section 5.4).
    """

    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        return F.cross_entropy(
            _wide(logits_BSV.flatten(0, -2)),
            targets_BS.flatten(),
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=self.smoothing if self.training else 0.0,
        )


class LabelLoss(nn.Module):
    """The same of a label a sequence: logits [b, n_labels], labels [b]."""

    def forward(self, logits_BL: Tensor, labels_B: Tensor) -> Tensor:
        return F.cross_entropy(_wide(logits_BL), labels_B, ignore_index=IGNORE, reduction="sum")


def places_per_chunk(hidden_BSH: Tensor, targets_BS: Tensor, chunk_tokens: int) -> int:
    """How many places of each sequence this device takes at a time, so that the logits of about
    `chunk_tokens` tokens exist together; all of them where that is 0."""
    n_chunks = -(-targets_BS.numel() // chunk_tokens) if chunk_tokens else 1
    return -(-hidden_BSH.shape[1] // n_chunks)


def chunked_loss(
    hidden_BSH: Tensor,
    targets_BS: Tensor,
    places: int,
    head: Callable[[Tensor], Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    parameters: Sequence[Tensor],
) -> Tensor:
    """The sum of loss(head(chunk), its targets) over chunks of `places` places of each sequence.

    The logits of one chunk exist at a time: of each, the gradients of its loss are taken at once,
    with respect to the hidden states and to parameters, and the chunk is let go of. Backward has
    nothing left to do but to scale them. So the head's products are multiplied as often as without
    chunks, and a device holds logits of b * places tokens instead of b * s.

    Where s is cut over devices, the hidden states are this device's [b, s/c, h], and the head makes
    logits of all s places: those of a chunk lie in every device's part of the sequence.

    Args:
        parameters: what the head reads besides, which gradients are wanted for.
    """
    b, s = hidden_BSH.shape[:2]
    targets = targets_BS.view(b, -1, s)
    chunks = [
        (slice(start, start + places), targets[..., start : start + places].reshape(b, -1))
        for start in range(0, s, places)
    ]
    if torch.is_grad_enabled():
        total: Tensor = _ChunkedLoss.apply(hidden_BSH, chunks, head, loss, *parameters)
        return total
    sums = [loss(head(hidden_BSH[:, chunk]), wanted) for chunk, wanted in chunks]
    return torch.stack(sums).sum()


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_BSH: Tensor,
        chunks: Sequence[tuple[slice, Tensor]],
        head: Callable[[Tensor], Tensor],
        loss: Callable[[Tensor, Tensor], Tensor],
        *parameters: Tensor,
    ) -> Tensor:
        grad_hidden = torch.empty_like(hidden_BSH)
        grads = [torch.zeros_like(p, dtype=_at_least_float32(p.dtype)) for p in parameters]
        total: Tensor | None = None
        for chunk, targets in chunks:
            with torch.enable_grad():
                hidden = hidden_BSH[:, chunk].detach().requires_grad_()
                part = loss(head(hidden), targets)
                found = torch.autograd.grad(part, (hidden, *parameters))
            total = part.detach() if total is None else total + part.detach()
            grad_hidden[:, chunk] = found[0]
            for grad, more in zip(grads, found[1:]):
                grad += more
            del part, found
        assert total is not None
        ctx.grads = [grad_hidden, *grads]
        ctx.dtypes = [hidden_BSH.dtype, *(p.dtype for p in parameters)]
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found, ctx.grads = ctx.grads, None
        assert found is not None, "a second backward pass through a chunked loss"
        scaled = [gradient.mul_(grads[0]) for gradient in found]
        grad_hidden, *rest = [gradient.to(dtype) for gradient, dtype in zip(scaled, ctx.dtypes)]
        return grad_hidden, None, None, None, *rest


def _wide(logits: Tensor) -> Tensor:
    return logits.to(_at_least_float32(logits.dtype))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
