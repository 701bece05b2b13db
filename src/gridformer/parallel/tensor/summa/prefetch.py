"""Gathered operands that are kept beyond one use, and weights that are gathered early.

Both are optional for every product: with `NOTHING`, a product gathers its operands when it needs
them and frees them afterward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gridformer.models.blocks.cast import cast, padded_columns
from gridformer.parallel.tensor.summa.operands import Operand
from gridformer.parallel.tensor.summa.products import Schedule
from gridformer.utils.torch_private import in_backward


class WeightPrefetcher:
    """Keeps or prefetches the gathered weight of one product, between `open` and `close`.

    The caller opens it only while weights do not change. `close` frees everything.

    Args:
        keeps: Whether the gathered column of the weight is kept from its first product until
            `close`. Otherwise it is freed after each use, but the neighboring product may have
            gathered it early (`prefetch`).

    Attributes:
        source: Returns the weight and the schedule that gathers it; None turns prefetching off.
        after: The prefetcher of the next product in forward order.
        before: The prefetcher of the previous product in forward order.
        ends_block: Whether the next product belongs to another block.
    """

    def __init__(self, keeps: bool = True) -> None:
        self.keeps = keeps
        self.source: Callable[[], tuple[Tensor, Schedule]] | None = None
        self.after: WeightPrefetcher | None = None
        self.before: WeightPrefetcher | None = None
        self.ends_block = False
        self._open = False
        self._operands: dict[tuple[torch.dtype, bool], Operand] = {}

    def operand(self, weight: Tensor, dtype: torch.dtype, padded: bool) -> Operand:
        """Returns the weight [K/r, N/c] in `dtype`, with what is already gathered of it."""
        # The lookup of the table and the head share it, unless their blocks differ.
        key = dtype, padded and padded_columns(weight, dtype) > weight.shape[1]
        if not self._open:
            return Operand(cast(weight, dtype, padded))
        if not self.keeps:
            return self._operands.pop(key, None) or Operand(cast(weight, dtype, padded))
        if key not in self._operands:
            self._operands[key] = Operand(cast(weight, dtype, padded))
        return self._operands[key]

    def prefetch(self, dtype: torch.dtype) -> None:
        """Starts to gather the weight early, while the neighboring product multiplies."""
        key = dtype, False
        if not self._open or self.source is None or key in self._operands:
            return
        weight, schedule = self.source()
        self._operands[key] = Operand(cast(weight, dtype))
        schedule.prefetch(None, self._operands[key])

    def open(self) -> None:
        """Allows the weight to be kept and prefetched; it must not change until `close`."""
        self._open = True

    def close(self) -> None:
        """Frees what is gathered."""
        self._open = False
        self._operands = {}


@dataclass
class KeepGathered:
    """Which gathered operands of a product are kept; the others are gathered again when needed.

    Attributes:
        input: Whether the gathered input is kept for the backward pass.
        weight: Keeps the gathered weight for the whole step, or prefetches it; None does neither.
    """

    input: bool = False
    weight: WeightPrefetcher | None = None

    def weight_operand(self, weight: Tensor, dtype: torch.dtype, padded: bool = False) -> Operand:
        """Returns the weight [K/r, N/c] in `dtype`, with what is already gathered of it.

        Args:
            weight: The local block, a parameter or its transpose.
            dtype: The dtype of the product.
            padded: See `gridformer.models.blocks.cast`.
        """
        if self.weight is None:
            return Operand(cast(weight, dtype, padded))
        return self.weight.operand(weight, dtype, padded)

    def prefetch_next(self, dtype: torch.dtype) -> None:
        """Starts to gather the weight of the next product, while this one multiplies."""
        if self.weight is None or self.weight.after is None:
            return
        # A block that is recomputed in the backward pass is followed by an earlier block.
        if not (self.weight.ends_block and in_backward()):
            self.weight.after.prefetch(dtype)

    def prefetch_previous(self, dtype: torch.dtype) -> None:
        """Like `prefetch_next`, in the backward pass, where the previous product comes next."""
        if self.weight is not None and self.weight.before is not None:
            self.weight.before.prefetch(dtype)


NOTHING = KeepGathered()
