"""Where weights are gathered ahead of their product or kept for a step, and gradients summed late.

All are optional: without a `GatheredWeight`, a product gathers its weight when it needs it,
frees it afterward, and waits for the sum of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.comm import Pending
from gridformer.mesh import Axis
from gridformer.models import blocks
from gridformer.models.blocks.cast import cast, padded_columns
from gridformer.models.blocks.gradient_sum import added_gradient
from gridformer.models.blocks.late_gradient import SPLIT
from gridformer.parallel.data.fsdp import gathered
from gridformer.parallel.tensor.summa.gathered import LABEL, Operand, weight_operand
from gridformer.utils.torch_private import has_hooks, in_backward

Uncast = list[tuple[Tensor, Tensor]]  # parameters, and the sums of their gradients


class DeferredSum:
    """A weight's gradient, whose sum over rows travels while the product before goes backward.

    The autograd node of that product has the parameters of the weight as further inputs. It waits
    for the sum at the end of its own backward pass and returns it as their gradients, in place of
    the node of the weight's own product. Autograd runs no parameter's hooks until both have run.
    With `GatheredWeight.late` the gradient is even multiplied there, while an activation travels.

    Attributes:
        parameters: The parameters of the weight, which lie side by side if there are several.
    """

    __slots__ = ("_given", "_over", "_weight", "parameters")

    def __init__(self, weight: GatheredWeight, parameters: Sequence[Tensor]) -> None:
        self.parameters, self._weight = parameters, weight
        self._given: Pending | Callable[[], Pending] | None = None
        self._over = False

    @property
    def late(self) -> bool:
        """Whether the product before multiplies the gradient, too."""
        return self._weight.late

    def give(self, total: Pending | Callable[[], Pending]) -> bool:
        """Leaves a sum to the product before, or returns that its backward pass is over.

        The sum has been started, or is started by a function that multiplies the gradient first.
        """
        if not self._over:
            self._given, self._weight.unread = total, self._weight.unread + 1
        return not self._over

    def begin(self) -> None:
        """Multiplies the gradient, if that is left to be done, and starts its sum."""
        if callable(self._given):
            self._given = self._given()

    def gradients(self, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Waits for the sum, if there is one, and returns the gradients of the parameters."""
        self.begin()
        total, self._given, self._over = self._given, None, True
        if total is None or callable(total):
            return [None] * len(self.parameters)
        self._weight.unread -= 1
        whole = total.wait().t() if self._weight.turned else total.wait()
        del total
        first, *more = self.parameters
        uncast = None if more or has_hooks(first) else self._weight.uncast
        if uncast is not None and whole.dtype != first.dtype:
            uncast += [(first, whole)] * wanted[0]
            return [None]
        widths = [parameter.shape[-1] for parameter in self.parameters]
        parts = whole.split(widths, -1) if len(widths) > 1 else (whole,)
        each = zip(self.parameters, parts, wanted)
        return [added_gradient(parameter, part) if x else None for parameter, part, x in each]


class GatheredWeight:
    """Keeps or prefetches the gathered weight of one product, between `open` and `close`.

    Between them the sum of the weight's gradient is also left to the product before, see
    `DeferredSum`. The caller opens it only while weights do not change. `close` frees everything.

    Args:
        keeps: Whether the gathered column of the weight is kept from its first product until
            `close`. Otherwise it is freed after each use, but the neighboring product may have
            gathered it early.
        late: Whether the weight's gradient is multiplied while the product before waits for the
            message of an activation.

    Attributes:
        block: Returns the local block of the weight; None turns prefetching off.
        after: The weight of the next product in forward order.
        before: The weight of the previous product in forward order.
        ends_block: Whether the next product belongs to another block.
        parameters: Returns the parameters that form the weight, for a product that runs once in a
            pass, after the previous product; None for others.
        turned: Whether the weight is the transpose of its parameter.
        defers: Whether the sum of the gradient is left to the previous product.
        is_open: Whether `open` was called, and `close` was not.
        unread: How many sums were left to the previous product, which has not waited for them.
        uncast: Takes parameters with sums that become gradients behind the backward pass; None if
            they do in it.
    """

    def __init__(self, row: Axis, keeps: bool = True, late: bool = False) -> None:
        self.row, self.keeps, self.late = row, keeps, late
        self.block: Callable[[], Tensor] | None = None
        self.after: GatheredWeight | None = None
        self.before: GatheredWeight | None = None
        self.ends_block = False
        self.parameters: Callable[[], Sequence[Tensor]] | None = None
        self.turned, self.defers, self.unread = False, True, 0
        self.uncast: Uncast | None = None
        self._deferred: DeferredSum | None = None
        self.is_open = False
        self._operands: dict[tuple[torch.dtype, bool], Operand] = {}

    def operand(self, weight: Tensor, dtype: torch.dtype, padded: bool = False) -> Operand:
        """Returns the weight [K/r, N/c] in `dtype`, with what is already gathered of it."""
        if not self.is_open:
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
        if self.is_open and self.after is not None and not (self.ends_block and in_backward()):
            self.after.prefetch(dtype)

    def prefetch_previous(self, dtype: torch.dtype) -> None:
        """Starts to gather the weight of the previous product, which comes next in backward."""
        if self.is_open and self.before is not None:
            self.before.prefetch(dtype)

    def prefetch(self, dtype: torch.dtype) -> None:
        """Starts to gather the weight early."""
        key = dtype, False
        if self.row.size > 1 and self.block is not None and key not in self._operands:
            local = cast(self.block(), dtype)
            started = comm.start_all_gather(local, self.row, 0, LABEL)
            self._operands[key] = Operand(local, started)

    def deferred(self, a: Tensor, b: Tensor) -> tuple[DeferredSum | None, DeferredSum | None]:
        """Returns whom a product of a and b leaves its sum to, and the sum that is left to it."""
        if not torch.is_grad_enabled() or SPLIT.wanted:
            return None, None
        mine, self._deferred = self._deferred, None
        # A product whose operands need no gradient has no backward pass.
        after = self.after if a.requires_grad or b.requires_grad else None
        # The nodes of what is recomputed are not used.
        if after is None or after.parameters is None or not after.defers or in_backward():
            return mine, None
        after._deferred = DeferredSum(after, after.parameters())
        return mine, after._deferred

    def open(self, uncast: Uncast | None = None) -> None:
        """Allows the weight to be kept and prefetched; it must not change until `close`."""
        self.is_open, self.unread, self.uncast = True, 0, uncast

    def close(self) -> None:
        """Frees what is gathered."""
        self.is_open, self._deferred, self.uncast = False, None, None
        self._operands = {}


def sum_within_blocks(model: nn.Module) -> None:
    """Leaves no sum of a gradient to a product of another block.

    All gradients of a block are then complete before the backward pass of the block before it.
    """
    for layer in (module for module in model.modules() if isinstance(module, blocks.Layer)):
        held = [vars(module).get("gathered_weight") for module in layer.modules()]
        weights = [weight for weight in held if weight is not None]
        for weight in weights:
            weight.defers = weight.before in weights


class GatheredWeightsScope:
    """The parts of a model that a step opens and closes, listed once for many steps.

    The model is complete: no product and no copy of a weight is added to it later.

    Args:
        model: The model.
        casts_together: Whether sums of gradients in half precision become gradients when it closes,
            in one kernel, if copies of weights have been kept until then, which take as much
            memory. This needs a single backward pass, without hooks that wait for the gradients.
    """

    def __init__(self, model: nn.Module, casts_together: bool = False) -> None:
        self.model = model
        # Not getattr, which is slow for what a module does not have.
        weights = [vars(module).get("gathered_weight") for module in model.modules()]
        self.weights = [weight for weight in weights if weight is not None]
        copies = {p: copy for p in model.parameters() if (copy := blocks.copy_of(p)) is not None}
        self.copied = [*copies]
        self.casts_together = casts_together and all(copy.once for copy in copies.values())
        self.slots = [slot for p in model.parameters() if (slot := blocks.gradient_slot(p))]

    @contextmanager
    def open(self) -> Iterator[None]:
        """Opens everything inside the context; see `gathered_weights_scope`."""
        uncast: Uncast = []
        for weight in self.weights:
            weight.open(uncast if self.casts_together else None)
        for slot in self.slots:
            slot.continued = True
        try:
            with blocks.keep_copies(self.copied), gathered(self.model):
                blocks.make_copies(self.copied)
                yield
            if any(weight.unread for weight in self.weights):
                raise RuntimeError(
                    "a weight's gradient was lost: the product before it in the order of the "
                    "model's modules has no part in the loss, or runs in another order"
                )
            if uncast:
                parameters, sums = zip(*uncast)
                for parameter in parameters:
                    parameter.grad = torch.empty_like(parameter)
                torch._foreach_copy_([parameter.grad for parameter in parameters], sums)
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
