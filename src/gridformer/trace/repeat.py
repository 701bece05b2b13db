"""Traces equal micro-batches of a pipeline once, and repeats what was recorded for the others.

What differs is run once: in a stage the first and the second micro-batch, and sometimes the last
one (gridformer.trace.which_passes). For the others what was recorded is repeated, and the results
are empty tensors with the right shapes. The pipeline's own code sends the messages between stages
(gridformer.trace.stage_messages).

Ranks whose stages have equal layers differ only in the order of their passes, so their traces can
be made from the passes of one of them (gridformer.trace.alike).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gridformer.models import Activations, Model
from gridformer.parallel.pipeline import Executor
from gridformer.parallel.pipeline.schedules import Action
from gridformer.trace.events import Event, Kernel, Passed, Place, Read, Start, Wait
from gridformer.trace.group import Log
from gridformer.trace.shape import Shape
from gridformer.trace.stage_messages import StageMessages
from gridformer.trace.which_passes import PassKind, WhichPasses
from gridformer.utils.batch import MicroBatch

_NOTHING = nullcontext()


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
        gradients: For a backward pass, how many events there are before the gradient of a
            parameter is complete, the number of the parameter in its stage, and the place.
    """

    events: Sequence[Event]
    products: int = 0
    out: dict[str, _Shape] | None = None
    gradients: list[tuple[int, int, Place]] = field(default_factory=list)


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
        recorded: Mapping[PassKind, RecordedPass] | None = None,
    ) -> None:
        self.log, self.count, self._sums = log, count, executor.sums
        self._passes = WhichPasses.of(executor, few=recorded is None and log.kernels)
        self._kinds = self._passes.kinds
        self._run = self._passes.actions() if recorded is None else set()
        self.recorded: dict[PassKind, RecordedPass] = dict(recorded or {})
        self._begun: dict[int, list[Shape | None]] = {}  # the first gradients of each stage
        self._noted: PassKind | None = None
        self._hooks = self._noting() if self._passes.completing else []
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
        for hook in self._hooks:
            hook.remove()

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
        if action in self._run:
            return self._recorded_pass(kind, action)
        return _Repeated(self, action)

    @contextmanager
    def _recorded_pass(self, kind: str, action: Action) -> Iterator[None]:
        """Surrounds a pass that is run."""
        with self._real_timed(kind, action):
            start, products = len(self.log.trace.events), self.count(0)
            self._now, self._noted = RecordedPass([]), self._kinds[action]
            self._start = start
            yield
            self._noted = None
            self._now.events = tuple(self.log.trace.events[start:])
            self._fold(start)
            self._now.products = self.count(0) - products
            self.recorded.setdefault(self._kinds[action], self._now)
        stage = self._kinds[action].stage
        first = kind == "backward" and self._kinds[action].which == "first"
        if first and stage in self._passes.completing:
            grads = [parameter.grad for parameter in self._passes.parameters[stage]]
            self._begun[stage] = [None if x is None else Shape.of(x) for x in grads]

    def _noting(self) -> list[Any]:
        """Lets parameters note when their gradients are complete in a pass that is recorded."""

        def note(stage: int, number: int, _: nn.Parameter) -> None:
            if self._noted is not None and self._noted.stage == stage:
                events = len(self.log.trace.events) - self._start
                self._now.gradients.append((events, number, self.log.places.of_kernel()))

        return [
            parameter.register_post_accumulate_grad_hook(partial(note, stage, number))
            for stage, parameters in enumerate(self._passes.parameters)
            for number, parameter in enumerate(parameters)
        ]

    def begin_repeated(self, action: Action) -> None:
        """Repeats what was recorded of a pass; until `end_repeated` nothing else is recorded."""
        kind = self._kinds[action]
        self._now, self._repeating = self.recorded[self._passes.source(kind)], True
        self.count(self._now.products)
        self.log.muted = True
        if kind.kind == "backward" and self._run:
            self._begin_gradients(kind)
            if kind.which == "last":  # its sums begin in `_backward`
                return
        self.recorded[kind] = self._now
        self._pass(self._now.events)

    def end_repeated(self) -> None:
        self._repeating = self.log.muted = False

    def _begin_gradients(self, kind: PassKind) -> None:
        """Gives parameters the gradients that the first backward pass of their stage makes."""
        like = self._passes.source(kind).stage
        if kind.which == "first" and like != kind.stage:
            for parameter, memory in zip(self._passes.parameters[kind.stage], self._begun[like]):
                parameter.grad = None if memory is None else memory.make()

    def _complete_gradients(self, kind: PassKind) -> None:
        """Repeats a backward pass, and begins sums of gradients as it completes these."""
        log, parameters = self.log, self._passes.parameters[kind.stage]
        begin, place = len(log.trace.events), 0
        for until, number, where in self._now.gradients:
            log.repeat(self._now.events[place:until], self._renumbered)
            place, log.muted = until, False
            hooks = parameters[number]._post_accumulate_grad_hooks or {}
            with log.places.at(where):
                for hook in hooks.values():
                    if getattr(hook, "__self__", None) is self._sums:
                        hook(parameters[number])
            log.muted = True
        log.repeat(self._now.events[place:], self._renumbered)
        events = tuple(log.trace.events[begin:])
        self._now = self.recorded[kind] = RecordedPass(events, self._now.products)
        self._fold(begin)

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
        if self._run and self._kinds[action].which == "last":
            self._complete_gradients(self._kinds[action])
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
