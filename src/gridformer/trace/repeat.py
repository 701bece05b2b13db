"""Traces equal micro-batches of a pipeline once, and repeats what was recorded for the others.

Most micro-batches do in a stage what the second one does: in the first one weights are gathered
that stay, and in the last one sums of gradients begin. So these three are run. For the others the
messages of the second one are repeated, and the results are empty tensors with the right shapes.
The pipeline's own code sends the messages between stages (gridformer.trace.stage_messages).

Ranks whose stages have equal layers differ only in the order of their passes, so their traces can
be made from the passes of one of them (gridformer.trace.alike).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gridformer.models import Activations, Model
from gridformer.parallel.pipeline import Executor
from gridformer.parallel.pipeline.schedules import Action
from gridformer.trace.events import Event, Kernel, Passed, Read, Start, Wait
from gridformer.trace.group import Log
from gridformer.trace.stage_messages import StageMessages
from gridformer.utils.batch import MicroBatch

_NOTHING = nullcontext()


class _Kind(NamedTuple):
    """The properties of a pass that decide what it does.

    Attributes:
        kind: `forward` or `backward`.
        stage: The number of its stage among those of this rank.
        which: `first` micro-batch, `last` if it completes gradients, else empty.
    """

    kind: str
    stage: int
    which: str


@dataclass(frozen=True)
class _Shape:
    """The properties from which a tensor like another one is made."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> _Shape:
        return _Shape(x.shape, x.dtype, x.device)

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass
class RecordedPass:
    """The record of a pass.

    Attributes:
        events: Its messages and waits.
        products: How many matrix products it launched.
        out: For a forward pass, the shapes of its results by name.
    """

    events: Sequence[Event]
    products: int = 0
    out: dict[str, _Shape] | None = None


@dataclass(frozen=True)
class _Messages:
    """The messages of a pass, by their numbers when it was recorded.

    Attributes:
        events: What the pass does.
        offsets: The messages that it starts, in their order, with their places in it.
        before: Those that it waits for and has not started.
        after: Those that it starts and does not wait for.
    """

    events: tuple[Start | Wait | Kernel | Read, ...]
    offsets: dict[int, int]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @staticmethod
    def of(events: tuple[Start | Wait | Kernel | Read, ...]) -> _Messages:
        starts = [event.number for event in events if isinstance(event, Start)]
        waits = [event.number for event in events if isinstance(event, Wait)]
        offsets = {number: offset for offset, number in enumerate(starts)}
        before = tuple(number for number in waits if number not in offsets)
        return _Messages(events, offsets, before, tuple({*starts} - {*waits}))


class _Numbers(Mapping[int, int]):
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


class Repeats:
    """Repeats passes of a pipeline instead of running them; see this module.

    Args:
        model: The model of the rank.
        executor: Runs its passes; some of its functions are replaced.
        log: The log of the rank.
        count: Adds to the number of matrix products so far, and returns it.
        recorded: Passes that are repeated for all actions, or None to record passes here.

    Attributes:
        recorded: The passes, by what they depend on.
        span: The positions in the trace between which the passes are.
    """

    def __init__(
        self,
        model: Model,
        executor: Executor,
        log: Log,
        count: Callable[[int], int],
        recorded: Mapping[_Kind, RecordedPass] | None = None,
    ) -> None:
        self.log, self.count = log, count
        itinerary, complete = executor.itinerary(executor.layout.micro_batches, training=True)
        self._kinds = _kinds(itinerary.actions, complete, executor.layout.pp)
        self._run = _to_run(itinerary.actions, self._kinds) if recorded is None else set()
        self.recorded: dict[_Kind, RecordedPass] = dict(recorded or {})
        self.span = 0, 0
        self._now = RecordedPass([])
        self._repeating = False
        self._renumbered: dict[int, int] = {}
        self._messages: dict[int, _Messages] = {}  # of passes, by the id of their events
        self._leaves: dict[_Shape, Tensor] = {}
        self._results: dict[_Shape, Tensor] = {}
        self._real_run = model.run
        self._real_train, self._real_timed = executor.train, executor.timed
        self._real_forward, self._real_backward = executor.forward, executor.backward
        replaced: list[tuple[Any, str, Any]] = [
            (model, "run", self._stage),
            (executor, "train", self._train),
            (executor, "timed", self._timed),
            (executor, "forward", self._forward),
            (executor, "backward", self._backward),
        ]
        messages = StageMessages(executor, log)
        replaced += messages.filling
        if recorded is not None:  # no pass runs, so none needs autograd
            replaced.append((executor, "enter", self._enter))
            replaced += messages.sending
        self._replaced = [(owner, name) for owner, name, _ in replaced]
        for owner, name, function in replaced:
            object.__setattr__(owner, name, function)

    def undo(self) -> None:
        """Gives the model and the executor their own functions back."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)

    @property
    def missing(self) -> bool:
        """Whether a pass can neither be run nor repeated."""
        return not self._run and not set(self._kinds.values()) <= set(self.recorded)

    def repeat(self, events: Sequence[Event]) -> None:
        """Adds copies of events to the trace. A wait may be for a message of earlier ones."""
        self.log.repeat(events, self._renumbered)

    def also_numbered(self, passes: Sequence[Event], later: Sequence[Event]) -> None:
        """Lets later waits name messages of passes by their numbers in another trace.

        Args:
            passes: The passes in that trace, which has repeated the same ones as this one.
            later: The events after them.
        """
        left = {event.number for event in later if isinstance(event, Wait)}
        left -= {event.number for event in later if isinstance(event, Start)}
        left -= self._renumbered.keys()
        for one in reversed(passes):  # what is waited for last began in the last passes
            if not left:
                break
            for recorded, number in one.numbers.items() if isinstance(one, Passed) else ():
                if number in left and recorded in self._renumbered:
                    self._renumbered[number] = self._renumbered[recorded]
                    left.remove(number)

    def _pass(self, events: Sequence[Event]) -> None:
        """Adds a pass, as one event where kernels are recorded."""
        if not self.log.kernels:
            self.repeat(events)
            return
        messages = self._messages.get(id(events))
        if messages is None:
            messages = self._messages[id(events)] = _Messages.of(plain(events))
        first = self.log.next_numbers(len(messages.offsets)).start
        before = {n: self._renumbered[n] for n in messages.before if n in self._renumbered}
        for number in messages.after:
            self._renumbered[number] = first + messages.offsets[number]
        numbers = _Numbers(messages.offsets, first, before)
        self.log.trace.events.append(Passed(messages.events, numbers))

    def _train(self, work: Sequence[MicroBatch], finish: Any) -> None:
        start = len(self.log.trace.events)
        self._real_train(work, finish)
        self.span = start, len(self.log.trace.events)

    def _timed(self, kind: str, action: Action) -> AbstractContextManager[None]:
        """Takes the place of `Executor.timed`, which surrounds passes and messages."""
        if kind not in ("forward", "backward"):
            return _NOTHING
        if (action.stage, action.micro) in self._run:
            return self._recorded_pass(kind, action)
        return _Repeated(self, action)

    @contextmanager
    def _recorded_pass(self, kind: str, action: Action) -> Iterator[None]:
        """Surrounds a pass that is run."""
        with self._real_timed(kind, action):
            start, products = len(self.log.trace.events), self.count(0)
            self._now = RecordedPass([])
            yield
            self._now.events = tuple(self.log.trace.events[start:])
            self._fold(start)
            self._now.products = self.count(0) - products
            self.recorded.setdefault(self._kinds[action], self._now)

    def begin_repeated(self, action: Action) -> None:
        """Repeats what was recorded of a pass; until `end_repeated` nothing else is recorded."""
        self._now, self._repeating = self.recorded[self._kinds[action]], True
        self._pass(self._now.events)
        self.count(self._now.products)
        self.log.muted = True

    def end_repeated(self) -> None:
        self._repeating = self.log.muted = False

    def _fold(self, start: int) -> None:
        """Makes one event of what a pass has done, where kernels are recorded."""
        if self.log.kernels:
            events = plain(self._now.events)
            numbers = {e.number: e.number for e in events if isinstance(e, Start)}
            self.log.trace.events[start:] = [Passed(events, numbers)]

    def _stage(self, batch: Any, entering: Activations | None, links: Any) -> Activations:
        """Takes the place of `Model.run`, and notes the shapes of its results."""
        found = self._real_run(batch, entering, links)
        self._now.out = {
            name: _Shape.of(x) for name, x in vars(found).items() if isinstance(x, Tensor)
        }
        return found

    def _enter(self, entered: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Takes the place of `Executor.enter`: all micro-batches have the same leaves."""
        leaves = {name: self._leaves.setdefault(_Shape.of(x), x) for name, x in entered.items()}
        return leaves, entered

    def _forward(
        self, action: Action, batch: Any, entering: Activations, finish: Any
    ) -> tuple[Activations, list[Any]]:
        """Takes the place of `Executor.forward`."""
        if not self._repeating:
            return self._real_forward(action, batch, entering, finish)
        assert self._now.out is not None
        out = {name: self._made(shape) for name, shape in self._now.out.items()}
        return Activations(**out), []

    def _made(self, shape: _Shape) -> Tensor:
        """Returns an empty tensor, which is the same for all micro-batches if no pass runs."""
        if self._run:
            return shape.empty()
        if shape not in self._results:
            self._results[shape] = shape.empty()
        return self._results[shape]

    def _backward(
        self, action: Action, leaves: Mapping[str, Tensor], roots: list[Any], grads: Any
    ) -> None:
        """Takes the place of `Executor.backward`."""
        if not self._repeating:
            self._real_backward(action, leaves, roots, grads)
            return
        for leaf in leaves.values():
            if leaf.grad is None:
                leaf.grad = _Shape.of(leaf).empty()


class _Repeated(AbstractContextManager[None]):
    """Surrounds a pass that is repeated. There are many, and a generator would take longer."""

    __slots__ = ("action", "repeats")

    def __init__(self, repeats: Repeats, action: Action) -> None:
        self.repeats, self.action = repeats, action

    def __enter__(self) -> None:
        self.repeats.begin_repeated(self.action)

    def __exit__(self, *_: object) -> None:
        self.repeats.end_repeated()


def plain(events: Sequence[Event]) -> tuple[Start | Wait | Kernel | Read, ...]:
    """Returns events among which there is no pass."""
    assert isinstance(events, tuple)
    return events


def _kinds(
    actions: Sequence[Action], complete: Mapping[Action, object], pp: int
) -> dict[Action, _Kind]:
    found = {}
    for action in actions:
        last = action._replace(kind="backward") in complete
        which = "last" if last else "first" if action.micro == 0 else ""
        found[action] = _Kind(action.kind, action.stage // pp, which)
    return found


def _to_run(actions: Sequence[Action], kinds: Mapping[Action, _Kind]) -> set[tuple[int, int]]:
    """Returns the stages and micro-batches whose forward and backward passes are run."""
    found: set[tuple[int, int]] = set()
    seen: set[_Kind] = set()
    for action in actions:
        mine = {kinds[action], kinds[action._replace(kind="backward")]}
        if action.kind == "forward" and (kinds[action].which or not mine <= seen):
            found.add((action.stage, action.micro))
            seen |= mine
    return found
