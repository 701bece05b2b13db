"""One product with several weights side by side: q, k and v, or the two of a gated feed-forward.

Parameters are separate tensors, while a product wants one matrix. It gets a placeholder for the
parameters side by side (`side_by_side`), which holds one element; `cast` makes the values when a
product reads them, in the forward pass and again in the backward pass. So autograd saves no second
copy of the weights. In bfloat16 and float16 the values are the copies of a step, which lie side by
side in one tensor from the start: the product costs no more kernels than one with a single weight.
On one device, products in the type of the parameters use one weight at a time, which needs no
copies at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gridformer.models.blocks.cast import stand_for
from gridformer.models.blocks.gradient_sum import continued
from gridformer.models.blocks.linear import Init, Role, linear, new_parameter


@dataclass(frozen=True)
class PartSize:
    """The size of one part of a `JoinedLinear`.

    Attributes:
        n_out: Size of the output's last dimension.
        init: How the weight is initialized; a bias starts at 0.
        pieces: The number of pieces of the part that are never split, such as heads of keys.
            Where they do not divide over devices, several devices compute the same ones. 0 if the
            part must divide over devices.
    """

    n_out: int
    init: Init
    pieces: int = 0


class JoinedPart(nn.Module):
    """The parameters of one part: weight [in, n_out] and bias [n_out] or None."""

    cast_parameters = ("weight", "bias")
    summed_parameters = ("weight",)

    def __init__(self, n_in: int, part: PartSize, bias: bool) -> None:
        super().__init__()
        self.pieces = part.pieces
        self.weight = new_parameter(n_in, part.n_out, init=part.init)
        self.bias: nn.Parameter | None = new_parameter(part.n_out, init=Init()) if bias else None


class JoinedParts(nn.Module):
    """The parts of a product as submodules, whose names are in the names of the parameters."""

    names: tuple[str, ...]

    def parts(self) -> list[JoinedPart]:
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


class JoinedLinear(JoinedParts):
    """Several products with one input, carried out as one: x [.., in] to one output [.., n] a part.

    Args:
        n_in: Size of the input's last dimension.
        parts: The sizes of the parts by name, in the order of the outputs.
        role: The role of the product in its model. It opens its section.
        bias: Whether the parts have biases.
    """

    def __init__(
        self, n_in: int, parts: Mapping[str, PartSize], role: Role, bias: bool = False
    ) -> None:
        super().__init__()
        assert role.opens, "a product with several outputs opens its section"
        self.role, self.names = role, tuple(parts)
        self.n_in, self.n_out = n_in, sum(part.n_out for part in parts.values())
        for name, part in parts.items():
            self.add_module(name, JoinedPart(n_in, part, bias))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = self.parts()
        # Joining would copy weights that have the type of the product, and compiled code keeps no
        # copies.
        if torch.compiler.is_compiling() or parts[0].weight.dtype == x.dtype:
            return tuple(linear(x, part.weight, part.bias) for part in parts)
        return self.split(linear(x, *self.operands(x.dtype)))


def side_by_side(parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns a differentiable placeholder for parameters side by side.

    It holds one element, and only `gridformer.models.blocks.cast` reads its values.

    Args:
        parameters: Matrices [in, n], or vectors [n].
        dtype: The dtype of the product. Gradients arrive in it and are cast part by part.
    """
    place: Tensor = _SideBySide.apply(dtype, *parameters)
    return stand_for(place, parameters)


class _SideBySide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        ctx.widths = [parameter.shape[-1] for parameter in parameters]
        ctx.parameters = parameters
        first = parameters[0]
        shape = (*first.shape[:-1], sum(ctx.widths))
        return first.new_empty((), dtype=dtype).expand(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        parts = grads[0].split(ctx.widths, -1)
        return None, *map(_added, ctx.parameters, parts)


def _added(parameter: Tensor, part: Tensor) -> Tensor:
    """Returns the gradient of a parameter, added to that of earlier micro-batches if possible."""
    total = continued(parameter)
    if total is None:
        return part.to(parameter.dtype)
    total.add(part)
    return total.result()
