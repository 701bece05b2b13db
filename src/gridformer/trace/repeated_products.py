"""Runs the products over chunks, blocks or panels once for each shape of their operands.

Such a product sends, waits and multiplies many times, and does the same each time that it has
operands of the same shapes. What its first call has logged is repeated for the later ones. What
waiting for a result logs is a part of its own, because a caller does other things in between.

A trace (gridformer.trace.products_once) and the log of memory (gridformer.memory.products_once)
record different things of a product; this module has what they share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar
from unittest.mock import patch

from torch import Tensor

from gridformer.comm import Pending
from gridformer.models.blocks.gradient_sum import ContinuedGradient
from gridformer.parallel.tensor.summa import Broadcast, ChunkedGather, fused_norm
from gridformer.parallel.tensor.summa.fused_norm import Norm
from gridformer.parallel.tensor.summa.gather import Gather, unchanged
from gridformer.parallel.tensor.summa.operands import Operand
from gridformer.trace.shape import Shape

_PRODUCTS: dict[Any, tuple[str, ...]] = {
    fused_norm: ("gradients_of_norm",),
    Gather: ("sum_of_blocks",),
    ChunkedGather: ("ab_by_chunks", "abt_by_chunks", "atb_by_chunks", "ab_and_atb_by_chunks"),
    Broadcast: ("ab", "abt", "atb"),
}
_NO_TENSOR: Any = None  # of a `Pending` whose result comes from its steps

Part = TypeVar("Part")
Product = Callable[..., Pending | tuple[Pending, ...]]


class NotRepeatableError(Exception):
    """A part of a step does something that repeating it in the log would not do."""


@dataclass(frozen=True)
class Made:
    """A tensor that a product has made and handed out.

    Attributes:
        number: The number of its storage in the log, where the log has such numbers.
        shape: Its shape.
    """

    number: int
    shape: Shape


class Recording(ABC, Generic[Part]):
    """Records what a product and the waits for its results log."""

    @abstractmethod
    def hand_in(self, x: Tensor) -> None:
        """Says that the product holds a tensor, perhaps alone, and frees it. Comes first."""

    @abstractmethod
    def begin(self) -> None:
        """Begins a part."""

    @abstractmethod
    def end(self) -> Part:
        """Ends the part and returns it.

        Raises:
            NotRepeatableError: The part depends on something outside it.
        """

    @abstractmethod
    def made(self, x: Tensor) -> Made:
        """Returns what is needed to make a tensor that the parts so far have made.

        Raises:
            NotRepeatableError: They have not made it.
        """

    @abstractmethod
    def complete(self, handed_out: Sequence[Made]) -> None:
        """Checks that the parts have ended all that they have begun, but what they hand out.

        Raises:
            NotRepeatableError: They have not.
        """


class Playing(ABC, Generic[Part]):
    """Repeats the parts of a product in the log."""

    @abstractmethod
    def hand_in(self, x: Tensor) -> None:
        """Takes a tensor that the product holds; see `Recording.hand_in`."""

    @abstractmethod
    def play(self, part: Part, made: Sequence[Made]) -> None:
        """Adds a part to the log.

        Args:
            part: The part.
            made: What the product hands out.
        """

    @abstractmethod
    def take(self, made: Made) -> Tensor:
        """Returns a tensor that the parts so far have made. The caller holds it from now on."""


@dataclass
class _Recorded(Generic[Part]):
    """The record of a product.

    Attributes:
        call: What the product itself logs. It is in two parts if in between the product waits for
            an operand that was in flight.
        waits: What waiting for each result logs, by the number of the result.
        results: The results by number. None stands for the sum of gradients to which the product
            has added.
        adds: Whether it adds to a sum of gradients.
        begun: The sum that it begins.
        possible: Whether it can be repeated, as far as is known.
        complete: Whether it can be repeated.
    """

    call: list[Part] = field(default_factory=list)
    waits: dict[int, Part] = field(default_factory=dict)
    results: dict[int, Made | None] = field(default_factory=dict)
    adds: bool = False
    begun: Made | None = None
    possible: bool = True
    complete: bool = False

    @property
    def handed_out(self) -> list[Made]:
        return [made for made in (self.begun, *self.results.values()) if made is not None]


class RepeatedProducts(Generic[Part]):
    """Runs a product once for each shape of its operands, and repeats it after that.

    Args:
        recording: Returns an object that records a product.
        playing: Returns an object that repeats a product.
        possible: Returns whether a product of a schedule can be repeated, by its name.
    """

    def __init__(
        self,
        recording: Callable[[], Recording[Part]],
        playing: Callable[[], Playing[Part]],
        possible: Callable[[str, Any], bool] = lambda *_: True,
    ) -> None:
        self._recording, self._playing, self._possible = recording, playing, possible
        self._known: dict[Any, _Recorded[Part]] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Repeats products inside the context."""
        with ExitStack() as stack:
            for kind, names in _PRODUCTS.items():
                for name in names:
                    once = self._once(name, getattr(kind, name))
                    stack.enter_context(patch.object(kind, name, once))
            yield

    def _once(self, name: str, product: Product) -> Product:
        def once(schedule: Any, *args: Any) -> Pending | tuple[Pending, ...]:
            key = _key_of(name, schedule, args)
            if key is None or not self._possible(name, schedule):
                return product(schedule, *args)
            key = id(schedule), key
            into = next((arg for arg in args if isinstance(arg, ContinuedGradient)), None)
            flying = (arg for arg in args if isinstance(arg, Operand) and arg.whole is not None)
            operand = next(flying, None)
            alone = next((arg for arg in args if isinstance(arg, list)), [])
            recorded = self._known.get(key)
            if recorded is None:  # one that began and cannot be repeated is never complete
                recorded = self._known[key] = _Recorded()
                run = partial(product, schedule, *args)
                return self._record(recorded, run, into, operand, alone)
            if not recorded.complete:
                return product(schedule, *args)
            return self._repeat(recorded, schedule, into, operand, alone)

        return once

    def _record(
        self,
        recorded: _Recorded[Part],
        product: Product,
        into: ContinuedGradient | None,
        operand: Operand | None,
        alone: list[Tensor],
    ) -> Pending | tuple[Pending, ...]:
        """Runs and records a product.

        Args:
            recorded: Is filled.
            product: The product.
            into: The sum of gradients to which it may add.
            operand: The operand that may be in flight.
            alone: Has the tensor that the product takes out of it, so that it may free it.
        """
        recording = self._recording()
        for x in alone:
            recording.hand_in(x)
            del x
        begun = into is not None and into.total.memory is not None
        if operand is not None:
            operand.whole = _watched(operand.whole, recording, recorded)
        recording.begin()
        found = product()
        several = isinstance(found, tuple)
        pending = [*found] if isinstance(found, tuple) else [found]
        del found
        try:
            recorded.call.append(recording.end())
            if into is not None and into.begun:
                recorded.adds = True
                if not begun and into.total.memory is not None:
                    recorded.begun = recording.made(into.total.memory)
        except NotRepeatableError:
            return tuple(pending) if several else pending[0]

        def wait(number: int, one: Pending, _: Tensor) -> Tensor:
            recording.begin()
            x = one.wait()
            try:
                recorded.waits[number] = recording.end()
                added = recorded.adds and _is_sum(x, into)
                recorded.results[number] = None if added else recording.made(x)
                if len(recorded.waits) == n:
                    recording.complete(recorded.handed_out)
                    recorded.complete = recorded.possible
            except NotRepeatableError:
                recorded.possible = recorded.complete = False
            return x

        n = len(pending)
        later = [Pending(_NO_TENSOR).then(partial(wait, i, x)) for i, x in enumerate(pending)]
        return tuple(later) if several else later[0]

    def _repeat(
        self,
        recorded: _Recorded[Part],
        schedule: Any,
        into: ContinuedGradient | None,
        operand: Operand | None,
        alone: list[Tensor],
    ) -> Pending | tuple[Pending, ...]:
        """Repeats a product of a schedule; see `_record`."""
        playing, handed_out = self._playing(), recorded.handed_out
        while alone:
            playing.hand_in(alone.pop())
        first, *second = recorded.call
        playing.play(first, handed_out)
        for part in second:
            assert operand is not None
            schedule.whole_column(operand)
            playing.play(part, handed_out)
        if recorded.adds:
            assert into is not None
            into.begun = True
            if recorded.begun is not None:
                into.total.begin(playing.take(recorded.begun))

        def wait(number: int, _: Tensor) -> Tensor:
            playing.play(recorded.waits[number], handed_out)
            made = recorded.results[number]
            if made is not None:
                return playing.take(made)
            assert into is not None
            return into.result()

        n = len(recorded.waits)
        later = [Pending(_NO_TENSOR).then(partial(wait, number)) for number in range(n)]
        return tuple(later) if len(later) > 1 else later[0]


def _watched(
    operand: Pending | None, recording: Recording[Part], recorded: _Recorded[Part]
) -> Pending:
    """Returns an operand that ends a part when somebody waits for it, and then begins the next."""
    assert operand is not None
    waiting = [operand]

    def wait(_: Tensor) -> Tensor:
        try:
            recorded.call.append(recording.end())
        except NotRepeatableError:
            recorded.possible = False
        x = waiting.pop().wait()
        recording.begin()
        return x

    return Pending(_NO_TENSOR).then(wait)


def _key_of(name: str, schedule: Any, args: Sequence[Any]) -> tuple[Any, ...] | None:
    """Returns what a product depends on; None if it cannot be repeated, or is not worth it."""
    if name == "sum_of_blocks" and schedule.row.size == 1:
        return None  # a single block
    found: list[Any] = [name]
    for arg in args:
        if isinstance(arg, Operand):
            if name == "gradients_of_norm" and arg.whole is not None:
                return None  # gathered at once
            found.append(arg.whole is None)
            arg = arg.local
        elif isinstance(arg, list):
            (arg,) = arg
        if isinstance(arg, Tensor):
            found += _key_of_tensor(arg)
        elif isinstance(arg, Norm):
            found += (*_key_of_tensor(arg.weight), arg.bias is None, arg.eps)
        elif isinstance(arg, ContinuedGradient):
            found.append(arg.kind)
        elif arg is None or arg is unchanged:
            found.append(arg)
        else:  # a one-hot matrix
            return None
    return tuple(found)


def _key_of_tensor(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device


def _is_sum(x: Tensor, into: ContinuedGradient | None) -> bool:
    """Whether a result is the sum of gradients to which its product has added."""
    total = None if into is None else into.total.memory
    return total is not None and x.untyped_storage()._cdata == total.untyped_storage()._cdata
