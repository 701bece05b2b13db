"""Where weights are gathered ahead of their product, or kept gathered for a step.

Both are optional: without a `GatheredWeight`, a product gathers its weight when it needs it and
frees it afterward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.mesh import Axis
from gridformer.models import blocks
from gridformer.models.blocks.cast import cast, padded_columns
from gridformer.parallel.data.fsdp import gathered
from gridformer.parallel.tensor.summa.gathered import LABEL, Operand, weight_operand
from gridformer.utils.torch_private import in_backward


class GatheredWeight:
    """Keeps or prefetches the gathered weight of one product, between `open` and `close`.

    The caller opens it only while weights do not change. `close` frees everything.

    Args:
        keeps: Whether the gathered column of the weight is kept from its first product until
            `close`. Otherwise it is freed after each use, but the neighboring product may have
            gathered it early.

    Attributes:
        block: Returns the local block of the weight; None turns prefetching off.
        after: The weight of the next product in forward order.
        before: The weight of the previous product in forward order.
        ends_block: Whether the next product belongs to another block.
    """

    def __init__(self, row: Axis, keeps: bool = True) -> None:
        self.row, self.keeps = row, keeps
        self.block: Callable[[], Tensor] | None = None
        self.after: GatheredWeight | None = None
        self.before: GatheredWeight | None = None
        self.ends_block = False
        self._open = False
        self._operands: dict[tuple[torch.dtype, bool], Operand] = {}

    def operand(self, weight: Tensor, dtype: torch.dtype, padded: bool = False) -> Operand:
        """Returns the weight [K/r, N/c] in `dtype`, with what is already gathered of it."""
        if not self._open:
            return weight_operand(weight, dtype, padded)
        # The lookup of the table and the head share it, unless their blocks differ.
        key = dtype, padded and padded_columns(weight, dtype) > weight.shape[1]
        operand = self._operands.get(key) if self.keeps else self._operands.pop(key, None)
        if operand is None:
            operand = weight_operand(weight, dtype, padded)
            if self.keeps:
                self._operands[key] = operand
        return operand

    def prefetch_next(self, dtype: torch.dtype) -> None:
        """Starts to gather the weight of the next product, while this one multiplies."""
        # A block that is recomputed in the backward pass is followed by an earlier block.
        if self._open and self.after is not None and not (self.ends_block and in_backward()):
            self.after.prefetch(dtype)

    def prefetch_previous(self, dtype: torch.dtype) -> None:
        """Starts to gather the weight of the previous product, which comes next in backward."""
        if self._open and self.before is not None:
            self.before.prefetch(dtype)

    def prefetch(self, dtype: torch.dtype) -> None:
        """Starts to gather the weight early."""
        key = dtype, False
        if self.block is not None and key not in self._operands:
            local = cast(self.block(), dtype)
            started = comm.start_all_gather(local, self.row, 0, LABEL)
            self._operands[key] = Operand(local, started)

    def open(self) -> None:
        """Allows the weight to be kept and prefetched; it must not change until `close`."""
        self._open = True

    def close(self) -> None:
        """Frees what is gathered."""
        self._open = False
        self._operands = {}


class GatheredWeightsScope:
    """The parts of a model that a step opens and closes, listed once for many steps.

    The model is complete: no product and no copy of a weight is added to it later.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # Not getattr, which is slow for what a module does not have.
        weights = [vars(module).get("gathered_weight") for module in model.modules()]
        self.weights = [weight for weight in weights if weight is not None]
        self.copied = [p for p in model.parameters() if blocks.copy_of(p) is not None]
        self.slots = [slot for p in model.parameters() if (slot := blocks.gradient_slot(p))]
        self.in_pipeline = len(vars(model).get("stages", ())) > 1

    @contextmanager
    def open(self) -> Iterator[None]:
        """Opens everything inside the context; see `gathered_weights_scope`."""
        for weight in self.weights:
            weight.open()
        for slot in self.slots:
            slot.continued = True
        try:
            with blocks.keep_copies(self.copied), gathered(self.model):
                if self.in_pipeline:  # while a rank waits for its first micro-batch
                    blocks.make_copies(self.copied)
                yield
        finally:
            for weight in self.weights:
                weight.close()
            for slot in self.slots:
                slot.continued = False


def gathered_weights_scope(model: nn.Module) -> AbstractContextManager[None]:
    """Lets products keep and prefetch gathered weights, as their choices say, inside this context.

    It also keeps the copies of weights in the type of the computation, and lets products add to the
    gradients of earlier micro-batches (gridformer.models.blocks.gradient_sum). Weights must not
    change inside it, except that a weight may be updated when the last product of a step has read
    it. With FSDP, it also enables gathering the parameters of each layer from the replicas.
    """
    return GatheredWeightsScope(model).open()
