"""Losses as sums over targets. Sums of parts add up to the total, so the trainer divides once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.models.blocks.gradient_sum import summed
from gridformer.models.kernels import library
from gridformer.models.kernels.cross_entropy import Words, cross_entropy
from gridformer.utils.batch import IGNORE, counts
from gridformer.utils.tensors import loop

Chunk = tuple[slice, Tensor]  # positions of each sequence, and their targets


class CrossEntropy(nn.Module):
    """Sums the cross entropy over all targets that are not IGNORE, in at least float32.

    Maps logits [b, s, v] and targets [b, s] to a scalar.

    Args:
        smoothing: The fraction of each target that training distributes evenly over the vocabulary
            (Vaswani et al. 2017, section 5.4).
        vocab_size: v, if the logits may have additional columns, which are left out.

    Attributes:
        fused: Whether a GPU uses gridformer.models.kernels.cross_entropy, which overwrites logits.
    """

    def __init__(self, smoothing: float = 0.0, vocab_size: int | None = None) -> None:
        super().__init__()
        self.smoothing, self.vocab_size = smoothing, vocab_size
        self.fused = True

    def forward(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        logits_TV = logits_BSV.flatten(0, -2)
        if self.fused and library.available(logits_TV.device, logits_TV.dtype):
            v, smoothing = self.vocab_size or logits_TV.shape[1], self.smoothing * self.training
            words = Words(0, v, 1.0 - smoothing, smoothing / v)
            return cross_entropy(logits_TV.contiguous(), targets_BS.flatten(), words)
        if self.vocab_size is None or logits_TV.shape[1] == self.vocab_size:
            logits_TV = _wide(logits_TV)
        else:
            logits_TV = _WideColumns.apply(logits_TV, self.vocab_size)
        smoothing = self.smoothing if self.training else 0.0
        if logits_TV.requires_grad:
            loss: Tensor = _CrossEntropy.apply(logits_TV, targets_BS.flatten(), smoothing)
            return loss
        return F.cross_entropy(
            logits_TV,
            targets_BS.flatten(),
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=smoothing,
        )


class _CrossEntropy(torch.autograd.Function):
    """Computes `F.cross_entropy`, and turns the logarithms that it keeps into the gradient.

    torch's function writes two more tensors as large as the logits in its backward pass.
    """

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, smoothing: float) -> Tensor:
        log_TV = torch.log_softmax(logits_TV, 1)
        loss = F.nll_loss(log_TV, targets_T, ignore_index=IGNORE, reduction="sum")
        if smoothing:
            spread = log_TV.mean(1).masked_fill(targets_T == IGNORE, 0.0).sum()
            loss = loss * (1.0 - smoothing) - spread * smoothing
        ctx.smoothing = smoothing
        ctx.save_for_backward(log_TV, targets_T)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (log_TV, targets_T), smoothing = ctx.saved_tensors, ctx.smoothing
        grad_TV = log_TV.exp_()
        if smoothing:
            grad_TV -= smoothing / grad_TV.shape[1]
        column_T1 = targets_T.clamp(min=0).unsqueeze(1)
        grad_TV.scatter_(1, column_T1, smoothing - 1.0, reduce="add")
        return grad_TV.mul_(((targets_T != IGNORE) * grads[0]).unsqueeze(1)), None, None


class LabelLoss(nn.Module):
    """Sums the cross entropy of labels over those that are not IGNORE, or squared differences.

    logits [b, n_labels], labels [b]    a label per sequence
    logits [b n, 1], labels [b]         which of a sample's n sequences is right
    logits [b, 2, s], labels [b, 2]     at which tokens an answer begins and ends
    logits [b, 1], numbers [b]          the number of a sequence; the sum of squared differences
                                        from those that are not NaN
    """

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        each, wanted = by_label(logits, labels), labels.flatten()
        if wanted.is_floating_point():
            numbers = _wide(each).squeeze(1)
            wrong = numbers - wanted.nan_to_num().to(numbers.dtype)
            return wrong.square().masked_fill(~counts(wanted), 0.0).sum()
        return F.cross_entropy(_wide(each), wanted, ignore_index=IGNORE, reduction="sum")


def by_label(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the logits [labels, values] of each label; see `LabelLoss` for their shapes."""
    return logits.reshape(labels.numel(), -1)


def places_per_chunk(hidden_BSH: Tensor, targets_BS: Tensor, chunk_tokens: int) -> int:
    """Returns how many positions of each sequence one chunk of `chunked_loss` has on this device.

    About `chunk_tokens` tokens' logits may exist at a time; 0 means all of them.
    """
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
    """Sums loss(head(chunk), targets of the chunk) over chunks of the sequence dimension.

    Only the logits of one chunk exist at a time. The forward pass computes the gradients of each
    chunk's loss with respect to the hidden states and the parameters, then frees the chunk; the
    backward pass only scales them. The head therefore multiplies as often as without chunks, and a
    device holds the logits of b * places tokens instead of b * s.

    If s is sharded over devices, the hidden states are this device's [b, s/c, h] and the head
    computes logits of all s positions, so a chunk takes positions from every device's part of the
    sequence.

    Args:
        places: Positions per chunk of each sequence on this device; see `places_per_chunk`.
        parameters: The other tensors that the head reads and that need gradients.
    """
    b, s = hidden_BSH.shape[:2]
    targets = targets_BS.view(b, -1, s)
    chunks = [
        (slice(start, start + places), targets[..., start : start + places].reshape(b, -1))
        for start in range(0, s, places)
    ]
    if torch.is_grad_enabled():
        of_chunks: Tensor = _ChunkedLoss.apply(hidden_BSH, chunks, head, loss, *parameters)
        return of_chunks
    total: Tensor | None = None
    for chunk, wanted in loop(chunks):
        part = loss(head(hidden_BSH[:, chunk]), wanted)
        total = part if total is None else total + part
    assert total is not None
    return total


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_BSH: Tensor,
        chunks: Sequence[Chunk],
        head: Callable[[Tensor], Tensor],
        loss: Callable[[Tensor, Tensor], Tensor],
        *parameters: Tensor,
    ) -> Tensor:
        grad_hidden = torch.empty_like(hidden_BSH)
        total: Tensor | None = None
        with summed(parameters) as sums:
            for chunk, targets in loop(chunks):
                with torch.enable_grad():
                    hidden = hidden_BSH[:, chunk].detach().requires_grad_()
                    part = loss(head(hidden), targets)
                    read = (hidden, *parameters)
                    gradients = torch.autograd.grad(part, read, allow_unused=True)
                total = part.detach() if total is None else total + part.detach()
                grad_hidden[:, chunk] = gradients[0]
                for sum_, more in zip(sums, gradients[1:], strict=True):
                    if more is not None:  # None if a product has added it to the sum itself
                        sum_.add(more)
                del part, gradients, more
        assert total is not None
        ctx.grads = [grad_hidden, *(sum_.value for sum_ in sums)]
        ctx.dtypes = [hidden_BSH.dtype, *(p.dtype for p in parameters)]
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        kept, ctx.grads = ctx.grads, None
        assert kept is not None, "a second backward pass through a chunked loss"
        scaled = [gradient.mul_(grads[0]) for gradient in kept]
        grad_hidden, *rest = [gradient.to(dtype) for gradient, dtype in zip(scaled, ctx.dtypes)]
        return grad_hidden, None, None, None, *rest


class _WideColumns(torch.autograd.Function):
    """Casts the first columns of logits [T, V] to float32; their gradient is 0 in the others.

    Leaving columns out costs no pass over the logits besides those of the casts.
    """

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, columns: int) -> Tensor:
        ctx.shape, ctx.dtype = logits_TV.shape, logits_TV.dtype
        return _wide(logits_TV[:, :columns])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        columns = grads[0].shape[1]
        grad_TV = grads[0].new_empty(ctx.shape, dtype=ctx.dtype)
        grad_TV[:, :columns] = grads[0]
        grad_TV[:, columns:] = 0
        return grad_TV, None


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
