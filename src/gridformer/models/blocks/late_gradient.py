"""Gradients of weights that are computed in a pass of their own, after a backward pass.

In a pipeline, only the gradients of inputs are urgent: another stage waits for them. So a schedule
may split backward passes (Qi et al. 2023). The backward pass of a product then leaves the gradient
of its weight to a `WeightPass`, as a function that keeps what the product has of both factors on
this device; what it gathers of them is gathered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# The gradient of a weight, or a function that waits for the rest of its sum over devices.
Started = Tensor | None | Callable[[], Tensor | None]


@dataclass
class Splitting:
    """What is open now.

    Attributes:
        wanted: Whether products make late gradients. Each reads it, which takes no call.
        left_to: The pass to which products leave gradients.
    """

    wanted: bool = False
    left_to: WeightPass | None = None


SPLIT = Splitting()


class LateGradient:
    """The gradient of a weight in one product.

    Its autograd node is made in the forward pass, where the weight is: autograd then takes the
    gradients of a pass in the order of a backward pass, and adds them to `.grad` as in one.
    """

    def __init__(self, weight: Tensor) -> None:
        self._root: Tensor = _Late.apply(weight)

    @staticmethod
    def of(weight: Tensor) -> LateGradient | None:
        """Returns that of a weight; None if it gets no gradient."""
        wanted = torch.is_grad_enabled() and weight.requires_grad
        return LateGradient(weight) if wanted else None

    def leave(self, start: Callable[[], Started]) -> bool:
        """Leaves the gradient to the open weight pass; returns False if none is open.

        `start` refers to no node of the product's graph, which would keep gradients in memory.
        """
        if SPLIT.left_to is None:
            return False
        self._root.grad_fn.start = start  # type: ignore[union-attr]
        SPLIT.left_to.roots.append(self._root)
        return True


class _Late(torch.autograd.Function):
    """A tensor without elements, whose backward pass computes the gradient of a weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.start = ctx.after = None
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        started, ctx.start = ctx.start(), None
        if callable(started):  # its sum travels while the next gradient is multiplied
            if ctx.after is not None:
                following = ctx.after.start()
                ctx.after.start = lambda: following
            started = started()
        ctx.after = None
        return started


class WeightPass:
    """The gradients of weights that one backward pass has left.

    Attributes:
        roots: The results of their nodes, in the order of that pass.
        compiled: Parameters whose gradients compiled code has left, each with what makes it. Their
            nodes are made in the weight pass, since compiled code has none of its own.
    """

    def __init__(self) -> None:
        self.roots: list[Tensor] = []
        self.compiled: list[tuple[Tensor, Callable[[], Started]]] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """Lets the products of a backward pass inside this context leave their gradients."""
        SPLIT.left_to = self
        try:
            yield
        finally:
            SPLIT.left_to = None

    @property
    def parameters(self) -> set[Tensor]:
        """The parameters whose gradients it computes."""
        found = {parameter for parameter, _ in self.compiled}
        nodes = [root.grad_fn for root in self.roots]
        while nodes:
            node: Any = nodes.pop()
            if hasattr(node, "variable"):
                found.add(node.variable)
            nodes += [one for one, _ in node.next_functions if one is not None]
        return found

    def run(self) -> None:
        """Computes the gradients and adds them to `.grad`."""
        roots, self.roots = self.roots, []
        while self.compiled:  # autograd takes the node that was made last first
            parameter, start = self.compiled.pop()
            roots.insert(0, root := _Late.apply(parameter))
            root.grad_fn.start = start
        nodes: list[Any] = [root.grad_fn for root in roots]
        for node, after in pairwise(nodes):
            node.after = after
        del nodes
        if roots:
            torch.autograd.backward(roots, [root.detach() for root in roots])


@contextmanager
def split_backward() -> Iterator[None]:
    """Lets products whose forward passes run inside this context leave gradients of weights."""
    SPLIT.wanted = True
    try:
        yield
    finally:
        SPLIT.wanted = False
