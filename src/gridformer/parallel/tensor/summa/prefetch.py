"""What of a product's gathered operands outlasts one use, and weights that are gathered early.

Optional beside every product: with `NOTHING` it gathers what it needs when it needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gridformer.models.blocks.recompute import in_backward
from gridformer.parallel.tensor.summa.operands import Operand
from gridformer.parallel.tensor.summa.products import Schedule


class WeightPrefetcher:
    """What is gathered of one product's weight beyond one use of it, between `open` and `close`.

    keeps: the whole of the weight's column, from the first product with it until `close`. Without,
    it may be asked for early, by the product before (`prefetch`), and is let go of when it is used.
    Nothing outlasts `close`: only who knows that weights do not change opens one.
    """

    def __init__(self, keeps: bool = True) -> None:
        self.keeps = keeps
        self.source: Callable[[], tuple[Tensor, Schedule]] | None = None  # for `prefetch`
        self.after: WeightPrefetcher | None = None  # the next product's, in forward order
        self.before: WeightPrefetcher | None = None
        self.ends_block = False  # the next product is of another block
        self._open = False
        self._operands: dict[torch.dtype, Operand] = {}

    def operand(self, weight: Tensor, dtype: torch.dtype) -> Operand:
        if not self._open:
            return Operand(weight.to(dtype))
        if not self.keeps:
            return self._operands.pop(dtype, None) or Operand(weight.to(dtype))
        if dtype not in self._operands:
            self._operands[dtype] = Operand(weight.to(dtype))
        return self._operands[dtype]

    def prefetch(self, dtype: torch.dtype) -> None:
        """Start to gather the weight: the product before this one is about to multiply."""
        if not self._open or self.source is None or dtype in self._operands:
            return
        weight, schedule = self.source()
        self._operands[dtype] = Operand(weight.to(dtype))
        schedule.prefetch(None, self._operands[dtype])

    def open(self) -> None:
        self._open = True

    def close(self) -> None:
        self._open = False
        self._operands = {}


@dataclass
class KeepGathered:
    """What of a product's gathered operands is kept: its input for the backward pass, its weight
    for the whole step. What is not kept is gathered again when it is needed again."""

    input: bool = False
    weight: WeightPrefetcher | None = None

    def weight_operand(self, weight: Tensor, dtype: torch.dtype) -> Operand:
        if self.weight is None:
            return Operand(weight.to(dtype))
        return self.weight.operand(weight, dtype)

    def prefetch_next(self, dtype: torch.dtype) -> None:
        """While this product multiplies, the next one's weight may travel. Not that of the next
        block where this one is computed again: backward has left that behind."""
        if self.weight is None or self.weight.after is None:
            return
        if not (self.weight.ends_block and in_backward()):
            self.weight.after.prefetch(dtype)

    def prefetch_previous(self, dtype: torch.dtype) -> None:
        """The same in the backward pass, where the product before this one is the next."""
        if self.weight is not None and self.weight.before is not None:
            self.weight.before.prefetch(dtype)


NOTHING = KeepGathered()
