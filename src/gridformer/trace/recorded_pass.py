"""The record of a pass of a pipeline through a stage, which is repeated for other micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from gridformer.trace.events import Event, Kernel, Place, Read, Start, Wait
from gridformer.trace.shape import Shape


@dataclass(frozen=True)
class EmptyLike:
    """The properties from which a tensor like another one is made."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> EmptyLike:
        return EmptyLike(x.shape, x.dtype, x.device)

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass
class RecordedPass:
    """The record of a pass.

    Attributes:
        events: Its messages and waits.
        products: How many matrix products it launched.
        out: For a forward pass, the shapes of its results by name.
        gradients: For a backward pass, how many events there are before the gradient of a
            parameter is complete, the number of the parameter in its stage, and the place.
        left: Messages that earlier passes have left on their way and this one waits for, without
            their numbers, by the numbers that this pass knows them by. A grid gathers the first
            weights of the next pass in advance.
    """

    events: Sequence[Event]
    products: int = 0
    out: dict[str, EmptyLike] | None = None
    gradients: list[tuple[int, int, Place]] = field(default_factory=list)
    left: dict[int, Start] = field(default_factory=dict)


class SumsApart:
    """Tells sums of gradients from the rest of the pass that begins them.

    Args:
        events: The events of the trace.
        start: The number of events before the pass.

    Attributes:
        begun: The shapes of gradients before their sums begin, by the number of the parameter.
    """

    def __init__(self, events: Sequence[Event], start: int) -> None:
        self._events, self._start = events, start
        self._spans: list[tuple[int, int]] = []  # in the pass
        self.begun: dict[int, Shape] = {}

    def call(
        self, hook: Callable[[nn.Parameter], None], number: int, parameter: nn.Parameter
    ) -> None:
        """Calls the hook that begins the sum of a gradient, and notes what it does.

        Args:
            hook: The hook.
            number: The number of the parameter in its stage.
            parameter: The parameter.
        """
        assert parameter.grad is not None
        self.begun[number] = Shape.of(parameter.grad)
        begin = len(self._events)
        hook(parameter)
        self._spans.append((begin - self._start, len(self._events) - self._start))

    def taken_from(self, recorded: RecordedPass) -> RecordedPass:
        """Returns the pass without the sums."""
        events: list[Event] = []
        place = 0
        for begin, end in self._spans:
            events += recorded.events[place:begin]
            place = end
        events += recorded.events[place:]
        gradients = [
            (until - sum(end - begin for begin, end in self._spans if end <= until), number, where)
            for until, number, where in recorded.gradients
        ]
        return replace(recorded, events=tuple(events), gradients=gradients)


@dataclass(frozen=True)
class PassMessages:
    """The messages of a pass, by their numbers when it was recorded.

    Attributes:
        events: What the pass does.
        offsets: The messages that it starts, in their order, with their places in it.
        before: Those that it waits for and has not started.
        after: Those that it starts and does not wait for, without their numbers.
    """

    events: tuple[Start | Wait | Kernel | Read, ...]
    offsets: dict[int, int]
    before: tuple[int, ...]
    after: dict[int, Start]

    @staticmethod
    def of(events: tuple[Start | Wait | Kernel | Read, ...]) -> PassMessages:
        starts = {event.number: event for event in events if isinstance(event, Start)}
        waits = [event.number for event in events if isinstance(event, Wait)]
        offsets = {number: offset for offset, number in enumerate(starts)}
        before = tuple(number for number in waits if number not in offsets)
        over = {*waits}
        after = {n: one._replace(number=0) for n, one in starts.items() if n not in over}
        return PassMessages(events, offsets, before, after)


class PassNumbers(Mapping[int, int]):
    """The numbers of a repeated pass's messages: those that it starts have consecutive ones."""

    __slots__ = ("before", "first", "offsets")

    def __init__(self, offsets: Mapping[int, int], first: int, before: Mapping[int, int]) -> None:
        self.offsets, self.first, self.before = offsets, first, before

    def __getitem__(self, number: int) -> int:
        if number in self.offsets:
            return self.first + self.offsets[number]
        return self.before[number]

    def __iter__(self) -> Iterator[int]:
        yield from self.offsets
        yield from self.before

    def __len__(self) -> int:
        return len(self.offsets) + len(self.before)


def plain(events: Sequence[Event]) -> tuple[Start | Wait | Kernel | Read, ...]:
    """Returns events among which there is no pass."""
    assert isinstance(events, tuple)
    return events
