"""Repeats the panels of a grid's products in the log of memory, without moving them again.

A product that goes panel by panel does the same each time that it has operands of the same shapes.
It runs once for each shape (and once more if it allocates a workspace that stays), and its log is
played again after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from gridformer.comm import Pending
from gridformer.memory.tape import NotRepeatableError, Numbers, Step, steps_of
from gridformer.memory.tracker import Entry, MemoryTracker
from gridformer.models.blocks.gradient_sum import ContinuedGradient
from gridformer.parallel.tensor.summa import Broadcast
from gridformer.parallel.tensor.summa.operands import Operand
from gridformer.trace.shape import Shape

Product = Callable[[Operand, Operand], Pending]
_Recorded = tuple[list[Step], int, Shape]  # its log, and the number and shape of its result


class _Product:
    """Runs a product once for each shape of its operands."""

    def __init__(self, product: Product, tracker: MemoryTracker) -> None:
        self.product, self.tracker = product, tracker
        self._recorded: dict[Any, _Recorded] = {}

    def __call__(self, a: Operand, b: Operand, _: ContinuedGradient | None = None) -> Pending:
        # Panel by panel no product adds to a gradient itself.
        if not (isinstance(a.local, Tensor) and isinstance(b.local, Tensor)):
            return self.product(a, b)  # one-hot matrices
        key = _key(a.local), _key(b.local)
        if key in self._recorded:
            return Pending(self._play(*self._recorded[key]))
        begins = len(self.tracker.changes)
        out = self.product(a, b)
        with suppress(NotRepeatableError):  # if a workspace grows; it fits the next time
            self._recorded[key] = self._record(begins, out.wait())
        return out

    def _record(self, begins: int, out: Tensor) -> _Recorded:
        numbers = Numbers()
        steps = steps_of(self.tracker.changes[begins:], numbers)
        entry = self.tracker.entry_of(out)
        number = None if entry is None else numbers[entry]
        shape = Shape.of(out)
        like = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta")
        if number is None or like.untyped_storage().nbytes() != shape.n_bytes:
            raise NotRepeatableError("the result is a part of something else")
        kept = {number} | {step.number for step in steps if step.what == "end"}
        if len(kept) < len(numbers.entries) or any(step.what in ("at", "tick") for step in steps):
            raise NotRepeatableError("something besides the result stays")
        return steps, number, shape

    def _play(self, steps: list[Step], result: int, shape: Shape) -> Tensor:
        tracker, entries = self.tracker, list[Entry]()
        out: Tensor | None = None
        for what, number, n_bytes, text, _ in steps:
            if what == "begin" and number == result:
                out = torch.empty_strided(
                    shape.size, shape.stride, dtype=shape.dtype, device=shape.device
                )
                entry = tracker.entry_of(out)
                assert entry is not None
                entries.append(entry)
            elif what == "begin":
                entries.append(tracker.begin(n_bytes, text))
            elif what == "end":
                tracker.end(entries[number])
            else:
                tracker.become(entries[number], text)
        assert out is not None
        return out


def _key(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.dtype


@contextmanager
def products_once(model: nn.Module, tracker: MemoryTracker) -> Iterator[None]:
    """Lets products that go panel by panel run once for each shape, inside the context.

    Args:
        model: The model of a rank.
        tracker: Keeps the log, in which all products appear.
    """
    found = {
        id(schedule): schedule
        for module in model.modules()
        for schedule in vars(module).values()
        if isinstance(schedule, Broadcast)
    }
    with ExitStack() as stack:
        for schedule in found.values():
            names = ("ab", "abt", "atb")
            for name in names:
                once = _Product(getattr(schedule, name), tracker)
                stack.enter_context(patch.object(schedule, name, once))
        yield
