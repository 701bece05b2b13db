"""Losses as sums over targets: sums of parts add up to the whole's, so the trainer divides once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.batch import IGNORE


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


class InParts:
    """A head's loss over some places of each sequence at a time.

    The logits of one part exist at a time: of each, the gradients of its loss are taken at once,
    with respect to what the head reads and to its parameters, and the part is let go of. Backward
    has nothing left to do but to scale them. So the head's products are multiplied as often as
    without parts, and a device that holds v/c columns of b*s tokens' logits holds those of `tokens`
    tokens instead.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def cuts(self, x_BSH: Tensor, targets_BS: Tensor) -> bool:
        """Whether there is more than one part."""
        # On meta another device has it.
        return self._width(x_BSH, targets_BS) < x_BSH.shape[1] and not x_BSH.is_meta

    def _width(self, x_BSH: Tensor, targets_BS: Tensor) -> int:
        """Places of each sequence in a part."""
        n_parts = -(-targets_BS.numel() // self.tokens) if self.tokens else 1
        return -(-x_BSH.shape[1] // n_parts)

    def __call__(
        self,
        x_BSH: Tensor,
        targets_BS: Tensor,
        head: Callable[[Tensor], Tensor],
        loss: Callable[[Tensor, Tensor], Tensor],
        parameters: Sequence[Tensor],
    ) -> Tensor:
        """The sum of loss(head(part), targets of the part) over all parts.

        Where s is cut over devices, x is this device's [b, s/c, h], and the head makes logits of
        all s places: those of a part lie in every device's part of the sequence.

        Args:
            parameters: what the head reads besides x, which gradients are wanted for.
        """
        if not self.cuts(x_BSH, targets_BS):
            return loss(head(x_BSH), targets_BS)
        (b, s), width = x_BSH.shape[:2], self._width(x_BSH, targets_BS)
        targets = targets_BS.view(b, -1, s)
        parts = [
            (slice(start, start + width), targets[..., start : start + width].reshape(b, -1))
            for start in range(0, s, width)
        ]
        if torch.is_grad_enabled():
            total: Tensor = _InParts.apply(x_BSH, parts, head, loss, *parameters)
            return total
        sums = [loss(head(x_BSH[:, places]), wanted) for places, wanted in parts]
        return torch.stack(sums).sum()


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BSH: Tensor,
        parts: Sequence[tuple[slice, Tensor]],
        head: Callable[[Tensor], Tensor],
        loss: Callable[[Tensor, Tensor], Tensor],
        *parameters: Tensor,
    ) -> Tensor:
        grad_x = torch.empty_like(x_BSH)
        grads = [torch.zeros_like(p, dtype=_at_least_float32(p.dtype)) for p in parameters]
        total: Tensor | None = None
        for places, targets in parts:
            with torch.enable_grad():
                x = x_BSH[:, places].detach().requires_grad_()
                part = loss(head(x), targets)
                found = torch.autograd.grad(part, (x, *parameters))
            total = part.detach() if total is None else total + part.detach()
            grad_x[:, places] = found[0]
            for grad, more in zip(grads, found[1:]):
                grad += more
            del part, found
        assert total is not None
        ctx.grads, ctx.dtypes = [grad_x, *grads], [x_BSH.dtype, *(p.dtype for p in parameters)]
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found, ctx.grads = ctx.grads, None
        assert found is not None, "a second backward pass through a loss in parts"
        scaled = [gradient.mul_(grads[0]) for gradient in found]
        grad_x, *rest = [gradient.to(dtype) for gradient, dtype in zip(scaled, ctx.dtypes)]
        return grad_x, None, None, None, *rest


def _wide(logits: Tensor) -> Tensor:
    return logits.to(_at_least_float32(logits.dtype))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
