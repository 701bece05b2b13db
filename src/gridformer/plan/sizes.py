"""Sizes of a micro-batch on one device, from which its loads follow by formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from gridformer.config import RunConfig
from gridformer.parallel.auto.cost import Choices
from gridformer.parallel.auto.products import Product
from gridformer.parallel.scheme import SchemeSpec
from gridformer.plan.load import AxisPlace, StepCosts

ALONE = AxisPlace((0,))


@dataclass(frozen=True)
class Sizes:
    """Sizes of a micro-batch on one device.

    Attributes:
        run: The run.
        choices: Its choices.
        spec: The spec of its scheme.
        costs: Seconds of kernels and messages.
        places: Where the axes lie; those of one device are left out.
        dtype: The type of products, which may be tf32.
    """

    run: RunConfig
    choices: Choices
    spec: SchemeSpec
    costs: StepCosts
    places: Mapping[str, AxisPlace]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element in products."""
        return self.choices.work.itemsize

    def place(self, axis: str) -> AxisPlace:
        """Returns where an axis lies; an axis of one device is at its place."""
        return self.places.get(axis, ALONE)

    @cached_property
    def activation_axis(self) -> str:
        """The axis over which sections are entered and left."""
        return self.spec.boundary(self.run.layout).axis

    @cached_property
    def lies(self) -> str:
        """How activations lie between sections, see `BoundarySpec`."""
        return self.spec.boundary(self.run.layout).lies

    def tokens(self, product: Product) -> int:
        """Returns the rows of a product's input on one row of devices."""
        return self.choices.tokens(product)

    def between(self, product: Product, width: int) -> float:
        """Returns the elements of an activation of that width between sections on a device."""
        share = self.choices.cols if self.choices.between == "cut" else 1
        return self.tokens(product) * width / share

    def memory_s(self, elements: float) -> float:
        """Returns the seconds of moving elements of the type of products through memory."""
        return self.costs.memory_s(elements * self.itemsize)

    @property
    def accumulated(self) -> float:
        """The fraction of backward passes that add to gradients which exist already."""
        return 1 - 1 / self.choices.work.micro_batches

    @property
    def joins_head(self) -> bool:
        """Whether a device adds the gradients of a tied table from its lookups and its head."""
        return self.run.model.tied_head and self.run.layout.pp == 1

    @property
    def wide(self) -> int:
        """Bytes of an element of norms, losses and parameters."""
        return max(4, self.itemsize)

    @property
    def cast(self) -> int:
        """Bytes that casting an element between the types of products and of norms moves."""
        return self.itemsize + self.wide if self.itemsize < self.wide else 0
