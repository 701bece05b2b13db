"""Optimus: two-dimensional tensor parallelism on an r x c grid (Xu, Li, Gong, You 2021).

Activations [b, s, h] are cut b over rows and h over columns; weights [in, out] are cut `in` over
rows and `out` over columns. Every product is a SUMMA product, attention is local (a device holds
b/r sequences and n/c heads, all s), LayerNorm adds up its statistics along a row.

A module here stands in for its plain namesake: same name, same parameters, local blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.comm import Axes
from gridformer.models import blocks
from gridformer.models.gpt2 import GPT2
from gridformer.parallel import summa
from gridformer.parallel.loss import CutCrossEntropy
from gridformer.parallel.placement import Placement, place, vocabulary_multiple

WEIGHT = Placement(cut=("row", "col"))
# Vectors lie over h like activations. Each row of the grid holds a copy and sees b/r sequences, so
# gradients are partial; row 0 owns. The paper sends them along the columns in every layer; here
# all travel once a step, in one message (gridformer.parallel.gradients).
VECTOR = Placement(cut=("col",), copies="row", partial=True)


class SummaLinear(nn.Module):
    """y = x W + b. x [b/r, s, in/c], W [in/r, out/c], b [out/c], y [b/r, s, out/c]."""

    def __init__(self, plain: blocks.Linear, axes: Axes) -> None:
        super().__init__()
        self.axes = axes
        self.weight, self.bias = plain.weight, plain.bias
        place(self, "weight", WEIGHT, axes)
        if plain.bias is not None:
            place(self, "bias", VECTOR, axes)

    def forward(self, x_BSI: Tensor) -> Tensor:
        y_BSO = summa.product_ab(x_BSI, self.weight.to(x_BSI.dtype), self.axes)
        return y_BSO if self.bias is None else y_BSO + self.bias.to(y_BSO.dtype)


class SummaTokenEmbedding(nn.Module):
    """One-hot tokens times the table: tokens [b/r, s] equal along a row, table [v/r, h/c]."""

    def __init__(self, plain: blocks.TokenEmbedding, axes: Axes) -> None:
        super().__init__()
        self.axes = axes
        self.weight = plain.weight
        pad = vocabulary_multiple(axes)
        place(self, "weight", Placement(cut=("row", "col"), pad=pad), axes)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return summa.one_hot_product(tokens_BS, self.weight, self.axes)


class SummaPositionEmbedding(nn.Module):
    """Positions as tokens of a second table [max_seq_len/r, h/c], padded if r does not divide."""

    def __init__(self, plain: blocks.PositionEmbedding, axes: Axes) -> None:
        super().__init__()
        self.axes = axes
        self.weight = plain.weight
        place(self, "weight", WEIGHT, axes)

    def forward(self, s: int, start: int = 0) -> Tensor:
        positions_S = torch.arange(start, start + s, device=self.weight.device)
        return summa.one_hot_product(positions_S, self.weight, self.axes)


class SummaTiedHead(nn.Module):
    """Logits [b/r, s, v/c] = x Tᵀ with the table that also embeds."""

    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x_BSH: Tensor, table_VH: Tensor) -> Tensor:
        return summa.product_abt(x_BSH, table_VH.to(x_BSH.dtype), self.axes)


class GridLayerNorm(nn.Module):
    """LayerNorm over h where h is cut over the columns.

    One message each way: forward the devices of a row exchange (mean, M2) and combine them, which
    does not cancel as E[x²]-E[x]² does; backward two sums a token are all-reduced.
    """

    def __init__(self, plain: blocks.LayerNorm, axes: Axes) -> None:
        super().__init__()
        self.eps, self.axes = plain.eps, axes
        self.weight, self.bias = plain.weight, plain.bias
        place(self, "weight", VECTOR, axes)
        place(self, "bias", VECTOR, axes)

    def forward(self, x_BSH: Tensor) -> Tensor:
        y_BSH: Tensor = _GridLayerNorm.apply(x_BSH, self.weight, self.bias, self.eps, self.axes)
        return y_BSH


class _GridLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor, eps: float, axes: Axes
    ) -> Tensor:
        x = x_BSH.to(weight_H.dtype)
        width = x.shape[-1]
        var, mean = torch.var_mean(x, -1, correction=0)
        parts = comm.all_gather(torch.stack((mean, var))[None], axes.col, 0, "norm")
        # Chan, Golub, LeVeque 1979: within-part variances plus the variance of the parts' means.
        mean = parts[:, 0].mean(0)
        var = parts[:, 1].mean(0) + (parts[:, 0] - mean).square().mean(0)
        rstd = torch.rsqrt(var + eps).unsqueeze(-1)
        normed = (x - mean.unsqueeze(-1)).mul_(rstd)
        ctx.save_for_backward(normed, rstd, weight_H)
        ctx.axes, ctx.h, ctx.dtype = axes, width * axes.col.size, x_BSH.dtype
        return torch.addcmul(bias_H, normed, weight_H).to(x_BSH.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        normed, rstd, weight_H = ctx.saved_tensors
        grad = grads[0].to(normed.dtype)
        grad_normed = grad * weight_H
        sums = torch.stack((grad_normed.sum(-1), (grad_normed * normed).sum(-1)))
        sums = comm.all_reduce(sums, ctx.axes.col, label="norm").div_(ctx.h).unsqueeze(-1)
        grad_x = (grad_normed - sums[0] - normed * sums[1]).mul_(rstd)
        tokens = tuple(range(grad.dim() - 1))
        grad_weight, grad_bias = (grad * normed).sum(tokens), grad.sum(tokens)
        return grad_x.to(ctx.dtype), grad_weight, grad_bias, None, None


def apply(model: GPT2, axes: Axes) -> None:
    """Replace a plain model's modules by their grid forms, in place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            match child:
                case blocks.Linear():
                    setattr(module, name, SummaLinear(child, axes))
                case blocks.LayerNorm():
                    setattr(module, name, GridLayerNorm(child, axes))
                case blocks.TokenEmbedding():
                    setattr(module, name, SummaTokenEmbedding(child, axes))
                case blocks.PositionEmbedding():
                    setattr(module, name, SummaPositionEmbedding(child, axes))
                case blocks.TiedHead():
                    setattr(module, name, SummaTiedHead(axes))
                case blocks.CrossEntropy():
                    cut = CutCrossEntropy(axes.col, model.config.vocab_size)
                    setattr(module, name, cut)
                case blocks.Dropout():
                    child.block = (0, axes.col.index)
                case blocks.Attention():
                    child.head_block = axes.col.index
