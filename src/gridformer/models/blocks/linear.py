"""The matrix products of a model, their roles, and the initialization of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.models.blocks.cast import cast, stand_for, stands_for_parameters
from gridformer.models.blocks.gradient_sum import added_gradient, continued, sum_behind
from gridformer.models.blocks.late_gradient import SPLIT, LateGradient
from gridformer.models.kernels.library import LIBRARY, define
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

    Several standard deviations alternate every `width` columns, such as those of q, k and v in a
    matrix that computes all three.
    """

    mean: float = 0.0
    std: float | tuple[float, ...] = 0.0
    width: int = 0


_INIT = TensorAttribute[Init]("init")


def new_parameter(*shape: int, init: Init) -> nn.Parameter:
    """Returns a parameter with its `Init`, by which gridformer.parallel.build initializes it."""
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
        weight_IO: A parameter, the transpose of one, or the placeholder of several.
        padded: Whether the result may have the additional columns of the cast copy.
    """
    late = LateGradient.of(weight_IO) if SPLIT.wanted else None
    if late is None and weight_IO.dtype == x.dtype and not stands_for_parameters(weight_IO):
        # F.linear would transpose the transpose once more, and both again in the backward pass.
        x = x if x.requires_grad else as_rows(x)
        return x @ weight_IO if bias_O is None else F.linear(x, weight_IO.t(), bias_O)
    weight = cast(weight_IO, x.dtype, padded)
    bias = None if bias_O is None else cast(bias_O, x.dtype, weight.shape[1] > len(bias_O))
    place = _CastLinear.apply(x, weight_IO, bias_O, weight.shape[1], late)
    out: Tensor = _CastLinearResult.apply(place, as_rows(x.detach()), weight, bias)
    return out


def as_rows(x: Tensor) -> Tensor:
    """Returns x [.., K], or a copy of it, so that its product with a matrix is a single one.

    For a slice of tokens torch would run a small product per sequence if nothing needs a gradient.
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
        ctx: Any,
        x: Tensor,
        weight_IO: Tensor,
        bias_O: Tensor | None,
        n_out: int,
        late: LateGradient | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_IO)
        ctx.late = late
        # Recomputation replaces saved tensors by others, which have no cast copy.
        ctx.weight = weight_IO
        ctx.bias = None if bias_O is None else bias_O.dtype
        return x.new_empty(()).expand(*x.shape[:-1], n_out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight_IO = ctx.saved_tensors
        n_out = weight_IO.shape[1]
        grad_out = as_rows(grads[0])
        rows, grad = x.detach().flatten(0, -2), grad_out.flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            weight = cast(ctx.weight, x.dtype, padded=grad.shape[1] > n_out)
            grad_x = grad_out @ weight.t()
        if ctx.needs_input_grad[1]:
            gradient = partial(_weight_gradient, rows, grad, weight_IO, ctx.weight)
            if ctx.late is None or not ctx.late.leave(gradient):
                grad_weight = gradient()
        if ctx.bias is not None:
            grad_bias = grad.sum(0, dtype=ctx.bias)[:n_out]
        return grad_x, grad_weight, grad_bias, None, None


def _weight_gradient(
    rows: Tensor, grad: Tensor, weight_IO: Tensor, weight: Tensor
) -> Tensor | None:
    """Returns the gradient of a weight; None if it was added to an open sum.

    Args:
        rows: The input [tokens, in].
        grad: The gradient of the output [tokens, out].
        weight: The tensor that may have a sum.
    """
    n_out = weight_IO.shape[1]
    total, more = sum_behind(weight), continued(weight)
    if more is not None:
        more.add_product(rows.t(), grad)
        return more.value
    if weight_IO.stride(0) != 1:
        return wide_product(rows.t(), grad, weight_IO.dtype)[:, :n_out]
    # Stored by columns, as the table of the tied head.
    if total is not None and total.shape == (n_out, rows.shape[1]):
        total.add_product(grad.t(), rows)
        return None
    return wide_product(grad.t(), rows, weight_IO.dtype)[:n_out].t()


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
    """Computes y = x W + b with W [in, out]: x [..., in] to [..., out]."""

    cast_parameters = ("weight", "bias")
    summed_parameters = ("weight",)

    def __init__(self, n_in: int, n_out: int, role: Role, init: Init, bias: bool = True) -> None:
        super().__init__()
        self.role = role
        self.weight = new_parameter(n_in, n_out, init=init)
        self.bias: nn.Parameter | None = new_parameter(n_out, init=Init()) if bias else None
        self.key: Tensor | None = None  # see `as_operator`

    def parts(self) -> list[Linear]:
        return [self]

    def operands(self, _: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias

    def forward(self, x: Tensor) -> Tensor:
        if self.key is not None and torch.compiler.is_compiling():
            return _called(self, x)
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


class GatedProduct(torch.autograd.Function):
    """Computes silu(gate) * up and keeps both factors, but not silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        activated = F.silu(gate)
        # See gridformer.models.blocks.norm.
        return activated * up if torch.compiler.is_compiling() else activated.mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return grad_gate, F.silu(gate).mul_(grads[0])


@dataclass(frozen=True)
class PartSize:
    """The size of one part of a `MergedLinear`.

    Attributes:
        pieces: The number of pieces of the part that are never split, such as heads of keys.
            Where they do not divide over devices, several devices compute the same ones. 0 if the
            part must divide over devices.
    """

    n_out: int
    init: Init
    pieces: int = 0


class MergedPart(nn.Module):
    """The parameters of one part: weight [in, n_out] and bias [n_out] or None."""

    cast_parameters = ("weight", "bias")
    summed_parameters = ("weight",)

    def __init__(self, n_in: int, part: PartSize, bias: bool) -> None:
        super().__init__()
        self.pieces = part.pieces
        self.weight = new_parameter(n_in, part.n_out, init=part.init)
        self.bias: nn.Parameter | None = new_parameter(part.n_out, init=Init()) if bias else None


class MergedParts(nn.Module):
    """The parts of a product as submodules, whose names are in the names of the parameters."""

    names: tuple[str, ...]

    def parts(self) -> list[MergedPart]:
        """Returns the parts in the order in which they lie side by side."""
        return [getattr(self, name) for name in self.names]

    def cast_together(self) -> list[list[Tensor]]:
        """Returns the parameters whose cast copies lie side by side in one tensor."""
        parts = self.parts()
        weights: list[Tensor] = [part.weight for part in parts]
        biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
        return [weights, biases] if biases else [weights]

    def operands(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Returns the placeholders of all weights and of all biases (or None) side by side."""
        weights, *biases = self.cast_together()
        return side_by_side(weights, dtype), side_by_side(biases[0], dtype) if biases else None

    def split(self, out: Tensor) -> tuple[Tensor, ...]:
        """Splits the output of the product into those of the parts, which are views of it."""
        return out.split([part.weight.shape[1] for part in self.parts()], -1)


class MergedLinear(MergedParts):
    """Several products with one input, carried out as one: x [.., in] to one output [.., n] a part.

    Outputs are in the order of the parts. The product opens its section.
    """

    def __init__(
        self, n_in: int, parts: Mapping[str, PartSize], role: Role, bias: bool = False
    ) -> None:
        super().__init__()
        assert role.opens, "a product with several outputs opens its section"
        self.role, self.names = role, tuple(parts)
        self.n_in, self.n_out = n_in, sum(part.n_out for part in parts.values())
        self.key: Tensor | None = None  # see `as_operator`
        for name, part in parts.items():
            self.add_module(name, MergedPart(n_in, part, bias))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = self.parts()
        if self.key is not None and torch.compiler.is_compiling():
            return self.split(_called(self, x))
        if parts[0].weight.dtype == x.dtype:  # joining would copy the weights
            return tuple(linear(x, part.weight, part.bias) for part in parts)
        return self.split(linear(x, *self.operands(x.dtype)))


def side_by_side(parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns a differentiable placeholder for matrices [in, n], or vectors [n], side by side.

    It holds one element, and only `gridformer.models.blocks.cast` reads its values. Gradients
    arrive in `dtype`, that of the product, and are cast part by part.
    """
    place: Tensor = _SideBySide.apply(dtype, *parameters)
    return stand_for(place, parameters)


class _SideBySide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.widths = [parameter.shape[-1] for parameter in parameters]
        ctx.parameters = parameters
        first = parameters[0]
        shape = (*first.shape[:-1], sum(ctx.widths))
        return first.new_empty((), dtype=dtype).expand(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if grads[0] is None:  # the product before returns the gradients
            return None, *[None] * len(ctx.parameters)
        parts = grads[0].split(ctx.widths, -1)
        return None, *map(added_gradient, ctx.parameters, parts)


# --------------------------------------------------------------------------- in compiled code

# A product in half precision reads the step's copies of its weights, and adds their gradients to
# those of earlier micro-batches. Compiled code knows values of tensors only and can do neither, so
# it calls such a product as operators, which find their module by a key. The key is a tensor, since
# compiled code would treat a number as a constant, and all layers run the same code.
_OPERATORS: WeakValueDictionary[int, Linear | MergedLinear] = WeakValueDictionary()
define("linear(Tensor x, Tensor key, int n_out) -> Tensor")
define("linear_input_gradient(Tensor grad, Tensor key, int n_in) -> Tensor")
define("linear_late_gradients(Tensor grad, Tensor key, Tensor x) -> Tensor")
define("linear_weight_gradients(Tensor x, Tensor grad, Tensor key, int[] widths) -> Tensor[]")


_KEYS = count()


def as_operator(module: Linear | MergedLinear) -> None:
    """Lets a module compute its product by operators in compiled code."""
    if module.key is None:
        module.key = torch.tensor(next(_KEYS), device="cpu")
        _OPERATORS[int(module.key)] = module


def _called(module: Linear | MergedLinear, x: Tensor) -> Tensor:
    parts = module.parts()
    biases = [part.bias for part in parts if part.bias is not None]
    late = SPLIT.wanted and x.requires_grad
    out: Tensor = _Operator.apply(
        x, module.key, len(parts), late, *(part.weight for part in parts), *biases
    )
    return out


class _Operator(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, key: Tensor, n_parts: int, late: bool, *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, key)
        ctx.late = late
        ctx.widths = [weight.shape[1] for weight in parameters[:n_parts]]
        ctx.biased, ctx.dtype = len(parameters) > n_parts, parameters[0].dtype
        out: Tensor = torch.ops.gridformer.linear(x, key, sum(ctx.widths))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ops, (x, key), (grad,) = torch.ops.gridformer, ctx.saved_tensors, grads
        grad_x, biases = None, ()
        weights: Sequence[Tensor | None] = [None] * len(ctx.widths)
        if ctx.late:
            grad_x = ops.linear_late_gradients(grad, key, x)
        elif ctx.needs_input_grad[0]:
            grad_x = ops.linear_input_gradient(grad, key, x.shape[-1])
        if not ctx.late and any(ctx.needs_input_grad[4 : 4 + len(weights)]):
            weights = ops.linear_weight_gradients(x, grad, key, ctx.widths)
        if ctx.biased:
            biases = grad.flatten(0, -2).sum(0, dtype=ctx.dtype).split(ctx.widths)
        return grad_x, None, None, None, *weights, *biases


def _copies(key: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    weight, bias = _OPERATORS[int(key)].operands(dtype)
    return cast(weight, dtype), None if bias is None else cast(bias, dtype)


@torch.library.impl(LIBRARY, "linear", "CompositeExplicitAutograd")
def _(x: Tensor, key: Tensor, n_out: int) -> Tensor:
    weight, bias = _copies(key, x.dtype)
    return F.linear(as_rows(x), weight.t(), bias)


@torch.library.impl(LIBRARY, "linear_input_gradient", "CompositeExplicitAutograd")
def _(grad: Tensor, key: Tensor, n_in: int) -> Tensor:
    return as_rows(grad) @ _copies(key, grad.dtype)[0].t()


@torch.library.impl(LIBRARY, "linear_late_gradients", "CompositeExplicitAutograd")
def _(grad: Tensor, key: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of x, and leaves those of the weights to the open weight pass.

    That reads x and `grad` later, so compiled code must not put anything else into their memory.
    """
    parts: Sequence[Linear | MergedPart] = _OPERATORS[int(key)].parts()
    weights = [part.weight for part in parts]
    factors = _factors(x, grad, [weight.shape[1] for weight in weights])
    assert SPLIT.left_to is not None, "a backward pass outside of a weight pass is not split"
    SPLIT.left_to.compiled.extend(
        (weight, partial(_added_product, weight, *pair)) for weight, pair in zip(weights, factors)
    )
    return torch.ops.gridformer.linear_input_gradient(grad, key, x.shape[-1])


@torch.library.impl(LIBRARY, "linear_weight_gradients", "CompositeExplicitAutograd")
def _(x: Tensor, grad: Tensor, key: Tensor, widths: Sequence[int]) -> list[Tensor]:
    parts: Sequence[Linear | MergedPart] = _OPERATORS[int(key)].parts()
    factors = _factors(x, grad, widths)
    return [_added_product(part.weight, *pair) for part, pair in zip(parts, factors)]


def _factors(x: Tensor, grad: Tensor, widths: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Returns the factors of the gradients of weights that lie side by side."""
    rows = x.flatten(0, -2).t()
    return [(rows, some) for some in as_rows(grad).flatten(0, -2).split(widths, -1)]


def _added_product(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    total = continued(weight)
    if total is None:
        return wide_product(a, b, weight.dtype)
    total.add_product(a, b)
    return total.value


@torch.library.register_fake("gridformer::linear", lib=LIBRARY)
@torch.library.register_fake("gridformer::linear_input_gradient", lib=LIBRARY)
def _(x: Tensor, key: Tensor, width: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


@torch.library.register_fake("gridformer::linear_late_gradients", lib=LIBRARY)
def _(grad: Tensor, key: Tensor, x: Tensor) -> Tensor:
    return grad.new_empty(x.shape)


@torch.library.register_fake("gridformer::linear_weight_gradients", lib=LIBRARY)
def _(x: Tensor, grad: Tensor, key: Tensor, widths: Sequence[int]) -> list[Tensor]:
    return [x.new_empty((x.shape[-1], width), dtype=torch.float32) for width in widths]
