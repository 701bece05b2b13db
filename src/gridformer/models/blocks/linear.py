"""The matrix products of a model, their roles, and the initialization of parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.models.blocks.cast import cast, stands_for_parameters
from gridformer.models.blocks.gradient_sum import continued, sum_behind
from gridformer.models.kernels.products import wide_product
from gridformer.utils.tensors import TensorAttribute

Section = Literal["attention", "feed_forward", "head"]
Activation = Literal["gelu", "gelu_tanh", "relu"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # GPT-2's
    "relu": F.relu,
}


@dataclass(frozen=True)
class Init:
    """How a parameter is initialized: `mean` plus normal noise with standard deviation `std`.

    Attributes:
        mean: The mean of all elements.
        std: One standard deviation, or several that alternate every `width` columns, such as those
            of q, k and v in a matrix that computes all three.
        width: How many columns each of several standard deviations covers at a time.
    """

    mean: float = 0.0
    std: float | tuple[float, ...] = 0.0
    width: int = 0


_INIT = TensorAttribute[Init]("init")


def new_parameter(*shape: int, init: Init) -> nn.Parameter:
    """Returns an uninitialized parameter with its `Init`.

    `gridformer.parallel.initialization` initializes it.
    """
    return with_init(nn.Parameter(torch.empty(*shape)), init)


def with_init(parameter: nn.Parameter, init: Init) -> nn.Parameter:
    """Records how a parameter is initialized, and returns it; `init_of` reads the record."""
    _INIT.set(parameter, init)
    return parameter


def init_of(parameter: Tensor) -> Init | None:
    """Returns how a parameter is initialized, or None if `with_init` was not called on it."""
    return _INIT.get(parameter)


@dataclass(frozen=True)
class Role:
    """The role of a product in its model, which is all that a parallel scheme knows about it.

    Attributes:
        product: A name that all layers of a stack share, for instance `decoder.qkv`.
        section: The section that the product belongs to.
        opens: Whether the product opens its section (h to wider; 1-D schemes shard it by columns)
            or closes it.
        reads: What dimension s of its input holds: the model's own tokens, the source's tokens, or
            no tokens but one vector per sequence.
    """

    product: str
    section: Section
    opens: bool = True
    reads: Literal["tokens", "source", "sequences"] = "tokens"


def linear(x: Tensor, weight_IO: Tensor, bias_O: Tensor | None, padded: bool = False) -> Tensor:
    """Computes x W + b in the precision of x.

    For a weight in another precision, autograd saves the weight itself and not its cast copy
    (gridformer.models.blocks.cast): the copies of all layers take as much memory as the whole model
    in that precision, so whether they are kept is a setting.

    Args:
        x: Input [..., in].
        weight_IO: Weight [in, out], a parameter, the transpose of one, or the placeholder of
            several.
        bias_O: Bias [out], or None.
        padded: Whether the result may have the additional columns of the cast copy, see `CastCopy`.
    """
    if weight_IO.dtype == x.dtype and not stands_for_parameters(weight_IO):
        # F.linear would transpose the transpose once more, and both again in the backward pass.
        x = x if x.requires_grad else as_rows(x)
        return x @ weight_IO if bias_O is None else F.linear(x, weight_IO.t(), bias_O)
    weight = cast(weight_IO, x.dtype, padded)
    bias = None if bias_O is None else cast(bias_O, x.dtype, weight.shape[1] > len(bias_O))
    place = _CastLinear.apply(x, weight_IO, bias_O, weight.shape[1])
    out: Tensor = _CastLinearResult.apply(place, as_rows(x.detach()), weight, bias)
    return out


def as_rows(x: Tensor) -> Tensor:
    """Returns x [.., K], or a copy of it, so that its product with a matrix is a single one.

    For a slice of tokens, such as a chunk of a loss, torch would run a small product per sequence
    where nothing needs a gradient.
    """
    if x.is_contiguous():
        return x
    # torch asks for the stride of a dimension of size 1, too.
    return x.flatten(0, -2).view(x.shape) if x.shape[-2] > 1 else x.contiguous()


class _CastLinear(torch.autograd.Function):
    """Records x W + b for the backward pass before `_CastLinearResult` computes it.

    A block that ends in this product then does not need to recompute it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_IO: Tensor, bias_O: Tensor | None, n_out: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight_IO)
        # Recomputation replaces saved tensors by others, which have no cast copy. Compiled code
        # has none anyway.
        ctx.weight = None if torch.compiler.is_compiling() else weight_IO
        ctx.bias = None if bias_O is None else bias_O.dtype
        return x.new_empty(()).expand(*x.shape[:-1], n_out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight_IO = ctx.saved_tensors
        n_out = weight_IO.shape[1]
        grad_out = as_rows(grads[0])
        grad = grad_out.flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            source = weight_IO if ctx.weight is None else ctx.weight
            weight = cast(source, x.dtype, padded=grad.shape[1] > n_out)
            grad_x = grad_out @ weight.t()
        if ctx.needs_input_grad[1]:
            total = None if ctx.weight is None else sum_behind(ctx.weight)
            more = None if ctx.weight is None else continued(ctx.weight)
            rows = x.flatten(0, -2)
            if more is not None:
                more.add_product(rows.t(), grad)
                grad_weight = more.result()
            elif (
                weight_IO.stride(0) == 1
            ):  # stored by columns, as the table that the head transposes
                if total is not None and total.shape == (n_out, rows.shape[1]):
                    total.add_product(grad.t(), rows)
                else:
                    grad_weight = wide_product(grad.t(), rows, weight_IO.dtype)[:n_out].t()
            else:
                grad_weight = wide_product(rows.t(), grad, weight_IO.dtype)[:, :n_out]
        if ctx.bias is not None:
            grad_bias = grad.sum(0)[:n_out].to(ctx.bias)
        return grad_x, grad_weight, grad_bias, None


class _CastLinearResult(torch.autograd.Function):
    """Computes x W + b, whose backward pass `_CastLinear` has recorded."""

    @staticmethod
    def forward(
        ctx: Any, place: Tensor, x: Tensor, weight_IO: Tensor, bias_O: Tensor | None
    ) -> Tensor:
        return F.linear(x, weight_IO.t(), bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None, None, None


class Linear(nn.Module):
    """Computes y = x W + b with W [in, out]: x [..., in] to [..., out].

    Args:
        n_in: Size of the input's last dimension.
        n_out: Size of the output's last dimension.
        role: The role of the product in its model.
        init: How the weight is initialized; the bias starts at 0.
        bias: Whether there is a bias.
    """

    cast_parameters = ("weight", "bias")
    summed_parameters = ("weight",)

    def __init__(self, n_in: int, n_out: int, role: Role, init: Init, bias: bool = True) -> None:
        super().__init__()
        self.role = role
        self.weight = new_parameter(n_in, n_out, init=init)
        self.bias: nn.Parameter | None = new_parameter(n_out, init=Init()) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class FeedForward(nn.Module):
    """A product from h to f, an activation, and a product from f to h: [b, s, h] to [b, s, h]."""

    def __init__(self, up: Linear, down: Linear, activation: Activation) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.up, self.down = up, down

    def forward(self, x_BSH: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(x_BSH)))
        return out
