"""Optimus: two-dimensional tensor parallelism on an r x c grid (Xu, Li, Gong, You 2021).

Activations [b, s, h] are cut b over rows and h over columns; weights are cut both ways. Every
product is a SUMMA product, attention is local (a device holds b/r sequences and n/c heads, all s).
A norm adds up its statistics along a row, unless the product that reads it gathers whole rows: then
these are normalised, and the norm sends nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.comm import Axes
from gridformer.models import blocks
from gridformer.models.gpt2 import GPT2
from gridformer.parallel.choices import Choices
from gridformer.parallel.ends import Cut
from gridformer.parallel.grid import (
    CutLabelHead,
    DeferredLayerNorm,
    GridLinear,
    GridTiedHead,
    GridTokenEmbedding,
    Schedules,
    keep_of,
)
from gridformer.parallel.loss import CutCrossEntropy
from gridformer.parallel.placement import Placement, place

# Vectors lie over h like activations. Each row of the grid holds a copy and sees b/r sequences, so
# gradients are partial; row 0 owns. The paper sends them along the columns in every layer; here
# all travel once a step, in one message (gridformer.parallel.gradients). So does the position
# table: it is small, and no device needs another's columns of it.
VECTOR = Placement(cut=("col",), copies="row", partial=True)
POSITIONS = Placement(cut=(None, "col"), copies="row", partial=True)


class GridLayerNorm(nn.Module):
    """LayerNorm over h where h is cut over the columns.

    One message each way: forward the devices of a row exchange (mean, variance) and combine them,
    which does not cancel as E[x²]-E[x]² does; backward two sums a token are all-reduced.
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


def apply(model: GPT2, axes: Axes, choices: Choices) -> None:
    """Replace a plain model's modules by their grid forms, in place."""
    schedules = Schedules(axes, Cut(axes.col, dim=-1))
    head, table = choices["head"], keep_of(choices["head"])
    inside = {name for name, choice in choices.products.items() if choice.norm_inside}
    readers = {"norm1": "qkv", "norm2": "up", "norm": "head"}  # which product reads a norm
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            match child:
                case blocks.Linear():
                    setattr(module, name, GridLinear(child, choices[name], VECTOR, schedules))
                case blocks.LayerNorm():
                    deferred = child.opens and readers[name] in inside
                    norm = DeferredLayerNorm if deferred else GridLayerNorm
                    setattr(module, name, norm(child, axes))
                case blocks.TokenEmbedding():
                    setattr(module, name, GridTokenEmbedding(child, head, table, schedules))
                case blocks.PositionEmbedding():
                    place(child, "weight", POSITIONS, axes)
                case blocks.TiedHead():
                    setattr(module, name, GridTiedHead(head, table, schedules))
                case blocks.LabelHead():
                    setattr(module, name, CutLabelHead(child, "row", axes))
                case blocks.CrossEntropy():
                    cut = CutCrossEntropy(axes.col, model.config.vocab_size)
                    setattr(module, name, cut)
                case blocks.Dropout():
                    child.block = (0, axes.col.index)
                case blocks.Attention():
                    child.head_block = axes.col.index
