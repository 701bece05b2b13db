"""Parameters, how they begin, and the matrix products of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Section = Literal["attention", "feed_forward", "head"]
Activation = Literal["gelu", "gelu_tanh", "relu"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # GPT-2's
    "relu": F.relu,
}


@dataclass(frozen=True)
class Init:
    """How a parameter begins: every element `mean`, plus normal noise of `std`.

    Several std take turns, each for `width` columns: q, k and v of a matrix that makes all three.
    """

    mean: float = 0.0
    std: float | tuple[float, ...] = 0.0
    width: int = 0


def new_parameter(*shape: int, init: Init) -> nn.Parameter:
    """An unfilled parameter and its Init; gridformer.parallel.initialization fills it."""
    return with_init(nn.Parameter(torch.empty(*shape)), init)


def with_init(parameter: nn.Parameter, init: Init) -> nn.Parameter:
    """Records how a parameter begins; `init_of` reads it."""
    parameter.init = init  # type: ignore[attr-defined]
    return parameter


def init_of(parameter: Tensor) -> Init | None:
    """How a parameter begins; None where nothing was recorded."""
    init: Init | None = getattr(parameter, "init", None)
    return init


@dataclass(frozen=True)
class Role:
    """What a product is in its model, which is all that a parallel scheme needs to know of it.

    product: a name that all layers of a stack share, for instance `decoder.qkv`. section: what it
    is part of. opens: whether it opens its section (h to wider, cut by columns in 1-D schemes) or
    closes it. reads: whose tokens its input has: the model's own, its source's, or one vector of
    each sequence.
    """

    product: str
    section: Section
    opens: bool = True
    reads: Literal["tokens", "source", "sequences"] = "tokens"


def linear(x: Tensor, weight_IO: Tensor, bias_O: Tensor | None) -> Tensor:
    """x W + b in the precision of x.

    Of a weight in another precision autograd keeps the weight, and not what is cast of it: of all
    layers together that would be as much again as the model, in that precision.
    """
    if weight_IO.dtype == x.dtype:
        return F.linear(x, weight_IO.t(), bias_O)
    place = _CastLinear.apply(x, weight_IO, bias_O)
    bias = None if bias_O is None else bias_O.detach()
    out: Tensor = _CastLinearResult.apply(place, x.detach(), weight_IO.detach(), bias)
    return out


class _CastLinear(torch.autograd.Function):
    """Records x W + b for the backward pass, before `_CastLinearResult` computes it: so a block
    that ends in it need not compute it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_IO: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_IO)
        ctx.bias = None if bias_O is None else bias_O.dtype
        return x.new_empty(()).expand(*x.shape[:-1], weight_IO.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight_IO = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        grad_x = grads[0] @ weight_IO.to(x.dtype).t() if ctx.needs_input_grad[0] else None
        grad_weight = (x.flatten(0, -2).t() @ grad).to(weight_IO.dtype)
        return grad_x, grad_weight, None if ctx.bias is None else grad.sum(0).to(ctx.bias)


class _CastLinearResult(torch.autograd.Function):
    """x W + b in the place of what stands for it."""

    @staticmethod
    def forward(
        ctx: Any, place: Tensor, x: Tensor, weight_IO: Tensor, bias_O: Tensor | None
    ) -> Tensor:
        bias = None if bias_O is None else bias_O.to(x.dtype)
        return F.linear(x, weight_IO.to(x.dtype).t(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None, None, None


class Linear(nn.Module):
    """y = x W + b, W [in, out]."""

    def __init__(self, n_in: int, n_out: int, role: Role, init: Init, bias: bool = True) -> None:
        super().__init__()
        self.role = role
        self.weight = new_parameter(n_in, n_out, init=init)
        self.bias: nn.Parameter | None = new_parameter(n_out, init=Init()) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class FeedForward(nn.Module):
    """h to f, an activation, f to h."""

    def __init__(self, up: Linear, down: Linear, activation: Activation) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.up, self.down = up, down

    def forward(self, x_BSH: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(x_BSH)))
        return out
