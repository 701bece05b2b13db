"""Traces equal micro-batches of a pipeline once, and repeats what was recorded for the others.

What differs is run once: in a stage the first and the second micro-batch, and sometimes the last
one (gridformer.trace.which_passes). For the others what was recorded is repeated, and the results
are empty tensors with the right shapes. The pipeline's own code sends the messages between stages
(gridformer.trace.stage_messages).

Ranks whose stages have equal layers differ only in the order of their passes, so their traces can
be made from the passes of one of them (gridformer.trace.alike).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from gridformer.models import Activations, Model
from gridformer.parallel.pipeline import Executor
from gridformer.parallel.pipeline.schedules import Action
from gridformer.trace.events import Event, Passed, Start, Wait
from gridformer.trace.group import Log
from gridformer.trace.known_stages import KnownStage, KnownStages
from gridformer.trace.recorded_pass import (
    EmptyLike,
    PassMessages,
    PassNumbers,
    RecordedPass,
    SumsApart,
    plain,
)
from gridformer.trace.shape import Shape
from gridformer.trace.stage_messages import StageMessages
from gridformer.trace.which_passes import PassKind, WhichPasses
from gridformer.utils.batch import MicroBatch

_NOTHING = nullcontext()


class Repeats:
    """Repeats passes of a pipeline instead of running them; see this module.

    Args:
        model: The model of the rank.
        executor: Runs its passes; some of its functions are replaced.
        log: The log of the rank.
        count: Adds to the number of matrix products so far, and returns it.
        recorded: Passes that are repeated for all actions, or None to record passes here.
        known: Stages that other ranks have recorded, which need not be run here.
        stamps: What copies the stamps of dropout to the device, if no pass runs here.
        training: Whether it is an optimizer step; otherwise there are forward passes alone.

    Attributes:
        recorded: The passes, by what they depend on.
        span: The positions in the trace between which the passes are.
        stamps: What copies the stamps of dropout for a micro-batch to the device, before the first
            of its passes; see `gridformer.models.blocks.clock`.
    """

    def __init__(
        self,
        model: Model,
        executor: Executor,
        log: Log,
        count: Callable[[int], int],
        recorded: Mapping[PassKind, RecordedPass] | None = None,
        known: KnownStages | None = None,
        stamps: tuple[Event, ...] = (),
        training: bool = True,
    ) -> None:
        self.log, self.count, self._sums = log, count, executor.sums
        self.recorded: dict[PassKind, RecordedPass] = dict(recorded or {})
        self._begun: dict[int, Sequence[Shape | None]] = {}  # the first gradients of each stage
        self._known, self._follows = known, recorded is not None
        few = not self._follows and log.kernels
        self._passes = WhichPasses.of(executor, few, self._take, training)
        self._kinds = self._passes.kinds
        self._run = set() if self._follows else self._passes.actions()
        self.stamps, self._clock = stamps, model.clock
        self._stamped: set[int] = set()  # micro-batches
        self._work: Sequence[MicroBatch] = ()
        self._noted: PassKind | None = None
        self._hooks = self._noting() if self._passes.completing else []
        self.span = 0, 0
        self._now = RecordedPass([])
        self._repeating = False
        self._renumbered: dict[int, int] = {}
        # Messages that passes have left on their way, by number, and those of each kind for which
        # nobody has waited yet.
        self._left: dict[int, Start] = {}
        self._open: dict[Start, list[int]] = defaultdict(list)
        self._messages: dict[int, PassMessages] = {}  # of passes, by the id of their events
        self._real_run = model.run
        name = "train" if training else "evaluate"
        self._real_go, self._real_timed = getattr(executor, name), executor.timed
        self._real_forward, self._real_backward = executor.forward, executor.backward
        replaced: list[tuple[Any, str, Any]] = [
            (model, "run", self._stage),
            (executor, name, self._go),
            (executor, "timed", self._timed),
            (executor, "forward", self._forward),
            (executor, "backward", self._backward),
        ]
        self._between = StageMessages(executor, log, self._run)
        replaced += self._between.replaced
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
        return self._follows and not set(self._kinds.values()) <= set(self.recorded)

    def _take(self, stage: int, content: Hashable) -> bool:
        """Takes the passes of a stage of this rank from those that are known, if they are there."""
        found = self._known.on(content, self.log.trace) if self._known is not None else None
        if found is None:
            return False
        for (kind, which), one in found.passes.items():
            self.recorded[PassKind(kind, stage, which)] = one
        self._begun[stage] = found.begun
        return True

    def add_to_known(self) -> None:
        """Adds the stages that were recorded here to those that other ranks know."""
        if self._known is None:
            return
        for stage in self._passes.completing - self._passes.known:
            sources = {
                one: self._passes.source(PassKind(one[0], stage, one[1]))
                for one in self._passes.repeated
            }
            passes = {one: self.recorded[source] for one, source in sources.items()}
            source = sources["backward", "alone" if self._passes.single else "first"].stage
            known = KnownStage(self.log.trace, passes, self._begun[source])
            self._known.add(self._passes.contents[stage], known)

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

    def _pass(self, recorded: RecordedPass) -> None:
        """Adds a pass, as one event where kernels are recorded."""
        if not self.log.kernels:
            self.repeat(recorded.events)
            return
        messages = self._messages_of(recorded)
        first = self.log.next_numbers(len(messages.offsets)).start
        before = self._before(recorded, messages)
        for number, start in messages.after.items():
            self._renumbered[number] = mine = first + messages.offsets[number]
            self._leave(mine, start)
        numbers = PassNumbers(messages.offsets, first, before)
        self.log.trace.events.append(Passed(messages.events, numbers))

    def _messages_of(self, recorded: RecordedPass) -> PassMessages:
        key = id(recorded.events)
        if key not in self._messages:
            self._messages[key] = PassMessages.of(plain(recorded.events))
        return self._messages[key]

    def _before(self, recorded: RecordedPass, messages: PassMessages) -> dict[int, int]:
        """Returns the numbers of the messages that a pass waits for and has not started.

        One that an earlier pass has left is that of the same pass, if nobody has waited for it, or
        else the latest of its kind. There is none if the passes of this rank come in another order
        than those of the rank that was run.
        """
        found: dict[int, int] = {}
        for number in messages.before:
            mine, start = self._renumbered.get(number, number), recorded.left.get(number)
            if start is not None:
                still = self._open[start]
                if not still:
                    continue
                mine = mine if mine in still else still[-1]
                still.remove(mine)
            found[number] = mine
        return found

    def _leave(self, number: int, start: Start) -> None:
        self._left[number] = start
        self._open[start].append(number)

    def _go(self, work: Sequence[MicroBatch], finish: Any) -> None:
        """Takes the place of `Executor.train`, or of `Executor.evaluate`."""
        start, self._work = len(self.log.trace.events), work
        self._real_go(work, finish)
        self.span = start, len(self.log.trace.events)

    def _timed(self, kind: str, action: Action) -> AbstractContextManager[None]:
        """Takes the place of `Executor.timed`, which surrounds passes and messages."""
        if kind not in ("forward", "backward"):
            return _NOTHING
        if action.micro not in self._stamped:
            self._stamp(action.micro)
        if action in self._run:
            return self._recorded_pass(kind, action)
        return _Repeated(self, action)

    def _stamp(self, micro: int) -> None:
        """Does what the first pass of a micro-batch begins with, whichever stage it is."""
        self._stamped.add(micro)
        events = self.log.trace.events
        if self._follows:
            events += self.stamps
            return
        begin = len(events)
        self._clock.at(self._work[micro].rows)
        self.stamps = tuple(events[begin:])

    @contextmanager
    def _recorded_pass(self, kind: str, action: Action) -> Iterator[None]:
        """Surrounds a pass that is run."""
        with self._real_timed(kind, action):
            start, products = len(self.log.trace.events), self.count(0)
            self._now, self._noted = RecordedPass([]), self._kinds[action]
            self._start = start
            with self._sums_apart() if self._alone(self._noted) else _NOTHING as sums:
                yield
            self._noted = None
            self._now.events = tuple(self.log.trace.events[start:])
            self._end(start)
            self._now.products = self.count(0) - products
            self.recorded.setdefault(self._kinds[action], self._now)
        stage = self._kinds[action].stage
        begins = kind == "backward" and (
            self._passes.single or self._kinds[action].which == "first"
        )
        if begins and stage in self._passes.completing:
            grads = [parameter.grad for parameter in self._passes.parameters[stage]]
            begun = [None if x is None else Shape.of(x) for x in grads]
            if sums is not None:
                begun = [sums.begun.get(number, shape) for number, shape in enumerate(begun)]
                alone = sums.taken_from(self._now)
                self.recorded[PassKind(kind, stage, "alone")] = alone
            self._begun[stage] = begun

    def _alone(self, kind: PassKind) -> bool:
        """Whether a pass is recorded without the sums of gradients that it begins, too."""
        passes = self._passes
        return passes.single and kind.kind == "backward" and kind.stage in passes.completing

    @contextmanager
    def _sums_apart(self) -> Iterator[SumsApart]:
        """Notes which events of a pass begin sums of gradients."""
        assert self._noted is not None
        found = SumsApart(self.log.trace.events, self._start)
        with ExitStack() as stack:
            for number, parameter in enumerate(self._passes.parameters[self._noted.stage]):
                hooks = parameter._post_accumulate_grad_hooks or {}
                for key, hook in hooks.items():
                    if getattr(hook, "__self__", None) is self._sums:
                        noting = partial(found.call, hook, number)
                        stack.enter_context(patch.dict(hooks, {key: noting}))
            yield found

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
        if kind.kind == "backward" and not self._follows:
            if kind.which == "last":  # its sums begin in `_backward`
                return
            self._begin_gradients(kind)
        self.recorded[kind] = self._now
        self._pass(self._now)

    def end_repeated(self) -> None:
        self._repeating = self.log.muted = False

    def _begin_gradients(self, kind: PassKind) -> None:
        """Gives parameters the gradients that the first backward pass of their stage makes."""
        like = self._passes.source(kind).stage
        first = self._passes.single or kind.which == "first"
        if first and (like != kind.stage or like in self._passes.known):
            for parameter, memory in zip(self._passes.parameters[kind.stage], self._begun[like]):
                parameter.grad = None if memory is None else memory.make()

    def _complete_gradients(self, kind: PassKind) -> None:
        """Repeats a backward pass, and begins sums of gradients as it completes these."""
        log, parameters = self.log, self._passes.parameters[kind.stage]
        begin, place = len(log.trace.events), 0
        numbers = self._before(self._now, self._messages_of(self._now))
        for until, number, where in self._now.gradients:
            log.repeat(self._now.events[place:until], numbers)
            place, log.muted = until, False
            hooks = parameters[number]._post_accumulate_grad_hooks or {}
            with log.places.at(where):
                for hook in hooks.values():
                    if getattr(hook, "__self__", None) is self._sums:
                        hook(parameters[number])
            log.muted = True
        log.repeat(self._now.events[place:], numbers)
        events = tuple(log.trace.events[begin:])
        self._now = self.recorded[kind] = RecordedPass(events, self._now.products)
        self._end(begin)

    def _end(self, begin: int) -> None:
        """Makes one event of what a pass has done, where kernels are recorded.

        Args:
            begin: The position in the trace at which the pass begins.
        """
        if not self.log.kernels:
            return
        messages = self._messages_of(self._now)
        self._now.left = {n: self._left[n] for n in messages.before if n in self._left}
        for number, start in self._now.left.items():
            if number in self._open[start]:  # it is not if it was repeated
                self._open[start].remove(number)
        for number, start in messages.after.items():
            self._leave(number, start)
        numbers = {n: n for n in (*messages.offsets, *messages.before)}
        self.log.trace.events[begin:] = [Passed(messages.events, numbers)]

    def _stage(self, batch: Any, entering: Activations | None, links: Any) -> Activations:
        """Takes the place of `Model.run`, and notes the shapes of its results."""
        found = self._real_run(batch, entering, links)
        self._now.out = {
            name: EmptyLike.of(x) for name, x in vars(found).items() if isinstance(x, Tensor)
        }
        return found

    def _forward(
        self, action: Action, batch: Any, entering: Activations, finish: Any
    ) -> tuple[Activations, list[Any]]:
        """Takes the place of `Executor.forward`."""
        if not self._repeating:
            return self._real_forward(action, batch, entering, finish)
        assert self._now.out is not None
        out = {name: self._between.empty(shape) for name, shape in self._now.out.items()}
        return Activations(**out), []

    def _backward(
        self, action: Action, leaves: Mapping[str, Tensor], roots: list[Any], grads: Any
    ) -> None:
        """Takes the place of `Executor.backward`."""
        if not self._repeating:
            self._real_backward(action, leaves, roots, grads)
            return
        if not self._follows and self._kinds[action].which == "last":
            self._begin_gradients(self._kinds[action])
            self._complete_gradients(self._kinds[action])
        for leaf in leaves.values():
            if leaf.grad is None:
                leaf.grad = self._between.empty(EmptyLike.of(leaf))


class _Repeated(AbstractContextManager[None]):
    """Surrounds a pass that is repeated. There are many, and a generator would take longer."""

    __slots__ = ("action", "repeats")

    def __init__(self, repeats: Repeats, action: Action) -> None:
        self.repeats, self.action = repeats, action

    def __enter__(self) -> None:
        self.repeats.begin_repeated(self.action)

    def __exit__(self, *_: object) -> None:
        self.repeats.end_repeated()
