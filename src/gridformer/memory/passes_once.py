"""Repeats the passes of a pipeline in the log of memory, without running them again.

All micro-batches of a step do the same in a stage, with three exceptions. The first one keeps the
gradients that it makes; the others free theirs when they are added, or add to the kept ones where
they multiply. The first one also keeps the copies of weights in the type of the computation. And
sums over replicas begin in the last one, in hooks of parameters. So the first one runs, and its log
is played again for the others. Messages between stages are real for all.

If the first one also allocates what stays, such as workspaces, or if hooks of parameters free these
(FSDP), the second one is the model of the others. The last one runs as well if more than its sums
over replicas makes it differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gridformer.memory.tape import (
    Numbers,
    Player,
    Step,
    steps_of,
    without_entries,
)
from gridformer.memory.tracker import Entry, MemoryChange, MemoryTracker
from gridformer.models import Activations
from gridformer.models.blocks.cast import CastCopy
from gridformer.models.blocks.gradient_sum import ContinuedGradient, GradientSum
from gridformer.parallel.pipeline import Executor
from gridformer.parallel.pipeline.executor import Finish
from gridformer.parallel.pipeline.schedules import Action
from gridformer.trace.repeated_products import NotRepeatableError
from gridformer.trace.shape import Shape
from gridformer.utils.batch import Batch

_NAMES = ("hidden", "memory")
_PLACEHOLDER, _HALF = 8, 2  # bytes of a tensor with one element, at most, and in 16 bits


@dataclass
class _Recorded:
    """The record of a stage with a micro-batch.

    Attributes:
        entering: Names of the activations that enter the stage.
        leaving: Names of the activations that leave it.
        numbers: The numbers of all storages.
        forward: The log of the forward pass.
        made: What the forward pass hands out, by number.
        numbers_of: The numbers of what it hands out: activations by name, then the loss.
        backward: The log of the backward pass, once it has run.
        grads: The gradients of what entered, by number.
        grads_of: Their numbers, by name.
        copies: The numbers of storages that are made to copy weights; other micro-batches find
            these copies.
        with_graph: The numbers of what is freed with the graph, after the backward pass.
    """

    entering: list[str]
    leaving: list[str]
    numbers: Numbers
    forward: list[Step]
    made: dict[int, Shape]
    numbers_of: list[int]
    backward: list[Step] | None = None
    grads: dict[int, Shape] = field(default_factory=dict)
    grads_of: dict[str, int] = field(default_factory=dict)
    copies: set[int] = field(default_factory=set)
    with_graph: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Played:
    """A micro-batch between its forward and its backward pass, neither of which runs.

    The executor frees it when it would free the graph.
    """

    player: Player


class _Leaf:
    """Takes the place of an autograd leaf: nothing is computed behind it.

    Args:
        x: What has entered the stage.
    """

    __slots__ = ("element", "grad")

    def __init__(self, x: Tensor) -> None:
        self.element = x.new_empty(())  # the memory of the leaf
        self.grad: Tensor | None = None


class _Passes:
    """Runs some passes and plays the others; its methods replace those of the executor.

    Args:
        executor: The executor.
        tracker: Keeps the log.
        n_micro: The number of micro-batches of a step.
        by_first: Whether the first micro-batch is the model of the others, not the second.
        last_runs: Whether the last micro-batch runs because its backward pass does more than
            begin sums over replicas.
    """

    def __init__(
        self,
        executor: Executor,
        tracker: MemoryTracker,
        n_micro: int,
        by_first: bool,
        last_runs: bool,
    ) -> None:
        self.executor, self.tracker = executor, tracker
        self._forward, self._backward = executor.forward, executor.backward
        self._enter, self._buffer = executor.enter, executor.stage_io.receive_buffer
        self.by_first, self.last_runs = by_first, last_runs
        self._parameters = [*executor.model.parameters()]
        self._recorded: dict[int, _Recorded] = {}
        self._recording = False
        self._with_graph: list[Entry] = []
        self._made: list[tuple[int, int]] = []
        self._sums: list[Entry] = []
        self._arriving: Entry | None = None
        self._model: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._played: dict[int, set[int]] = {}
        actions = executor.itinerary(n_micro, training=True)[0].actions
        for stage in {action.stage for action in actions}:
            order = [a.micro for a in actions if a.stage == stage and a.kind == "backward"]
            if order == [a.micro for a in actions if a.stage == stage and a.kind == "forward"]:
                self._model[stage], *rest = order[not by_first :]
                self._last[stage] = order[-1]
                self._played[stage] = {*(rest[:-1] if last_runs else rest)}

    @contextmanager
    def watching_gradients(self) -> Iterator[None]:
        """Notes in the log when the backward pass that is recorded makes gradients."""
        handles: list[Any] = []
        nodes: list[Any] = []  # torch makes other ones if nobody holds them
        for number, parameter in enumerate(self._parameters):
            if self.by_first:
                node: Any = get_gradient_edge(parameter).node
                nodes.append(node)
                handles.append(node.register_prehook(self._arrives))
            done = partial(self._accumulated, number)
            handles.append(parameter.register_post_accumulate_grad_hook(done))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _arrives(self, grads: tuple[Tensor, ...]) -> None:
        if self._recording:
            self._arriving = self.tracker.entry_of(grads[0])
            self.tracker.changes.append(MemoryChange("gradient", self._arriving))

    def _accumulated(self, number: int, parameter: nn.Parameter) -> None:
        if not self._recording:
            return
        if not self.by_first:  # it was added to that of the first micro-batch
            self.tracker.changes.append(MemoryChange("accumulated", None, str(number)))
            return
        assert parameter.grad is not None
        entry = self.tracker.entry_of(parameter.grad)
        # Torch copies a gradient that is a part of another tensor, or that others hold.
        kept = entry if entry is self._arriving else None
        self.tracker.changes.append(MemoryChange("accumulated", kept, str(number)))

    def slice(self, x: Tensor) -> Tensor:
        """See `StageIO.slice`. Slices have the memory of the whole, and nothing is sent."""
        return x

    def receive_buffer(self, x: Tensor) -> Tensor:
        """See `StageIO.receive_buffer`."""
        return self._buffer(x) if self.executor.stage_io.scattered(x) else x

    def enter(
        self, action: Action, entered: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Executor.enter`."""
        if action.micro not in self._played.get(action.stage, ()):
            return self._enter(action, entered)
        return {name: _Leaf(x) for name, x in entered.items()}, entered

    def forward(
        self, action: Action, batch: Batch, entering: Activations, finish: Finish
    ) -> tuple[Activations, list[Any]]:
        """See `Executor.forward`."""
        self._check_graph()
        if action.micro in self._played.get(action.stage, ()):
            return self._play_forward(self._recorded[action.stage], entering)
        if action.micro != self._model.get(action.stage):
            return self._forward(action, batch, entering, finish)
        names = [name for name in _NAMES if getattr(entering, name) is not None]
        given = [self.tracker.entry_of(getattr(entering, name)) for name in names]
        begins = len(self.tracker.changes)
        leaving, roots = self._forward(action, batch, entering, finish)
        numbers = Numbers(given)
        steps = steps_of(self.tracker.changes[begins:], numbers)
        left = [name for name in _NAMES if getattr(leaving, name) is not None]
        out = [getattr(leaving, name) for name in left]
        out += [root for root in roots if isinstance(root, Tensor)]
        found = _Recorded(names, left, numbers, steps, {}, [])
        passing = {number for number, name in enumerate(names) if name in left}
        found.numbers_of = self._shapes(out, found.made, numbers, len(given), passing)
        if self.by_first:  # the copies of weights that it makes are there for the others
            made = [change for a, b in self._made for change in self.tracker.changes[a:b]]
            entries = [one.entry for one in made if one.what == "begin" and one.entry is not None]
            found.copies = {n for entry in entries if (n := numbers[entry]) is not None}
            found.forward = without_entries(steps, found.copies)
        self._recorded[action.stage] = found
        return leaving, roots

    @contextmanager
    def watching_sums(self) -> Iterator[None]:
        """Notes which gradients begin as sums, to which other micro-batches add."""

        def noting(real: Callable[..., None]) -> Callable[..., None]:
            def add(gradient: ContinuedGradient, *given: Tensor) -> None:
                begin = len(self.tracker.changes)
                real(gradient, *given)
                entry = self.tracker.entry_of(gradient.result())
                made = self.tracker.changes[begin:]
                if entry and any(one.what == "begin" and one.entry is entry for one in made):
                    self._sums.append(entry)

            return add

        def begin(total: GradientSum, memory: Tensor) -> None:
            begin_sum(total, memory)
            entry = self.tracker.entry_of(memory)
            assert entry is not None, "a repeated product has made it"
            self._sums.append(entry)

        begin_sum = GradientSum.begin
        with (
            patch.object(ContinuedGradient, "add", noting(ContinuedGradient.add)),
            patch.object(ContinuedGradient, "add_product", noting(ContinuedGradient.add_product)),
            patch.object(GradientSum, "begin", begin),
        ):
            yield

    @contextmanager
    def watching_copies(self) -> Iterator[None]:
        """Notes which part of the log makes copies of weights that stay."""
        real, changes = CastCopy.of, self.tracker.changes

        def of(copy: CastCopy, parameter: Tensor) -> Tensor:
            before, begin = copy.value, len(changes)
            found = real(copy, parameter)
            if before is None and copy.value is not None:
                self._made.append((begin, len(changes)))
            return found

        with patch.object(CastCopy, "of", of):
            yield

    def backward(
        self,
        action: Action,
        leaves: Mapping[str, Tensor],
        roots: list[Any],
        grads: list[Tensor] | None,
    ) -> None:
        """See `Executor.backward`."""
        self._check_graph()
        played = roots[-1]
        if isinstance(played, _Played):
            last = action.micro == self._last[action.stage]
            self._play_backward(self._recorded[action.stage], played, leaves, last)
            return
        if action.micro != self._model.get(action.stage):
            self._backward(action, leaves, roots, grads)
            return
        recorded = self._recorded[action.stage]
        before = len(recorded.numbers.entries)
        begins = len(self.tracker.changes)
        self._recording = True
        self._backward(action, leaves, roots, grads)
        self._recording = False
        steps = steps_of(self.tracker.changes[begins:], recorded.numbers)
        sums = {n for entry in self._sums if (n := recorded.numbers[entry]) is not None}
        recorded.backward = without_entries(steps, sums) if self.by_first else steps
        received = [leaf.grad for leaf in leaves.values()]
        in_forward = range(len(recorded.entering), before)  # where a loss makes its gradient
        made = self._shapes(received, recorded.grads, recorded.numbers, before, in_forward)
        recorded.grads_of = dict(zip(leaves, made))
        for number, x in zip(made, received):
            if number in in_forward and x is not None:
                recorded.made[number] = Shape.of(x)
        self._check(recorded)

    def _shapes(
        self,
        out: list[Tensor | None],
        shapes: dict[int, Shape],
        numbers: Numbers,
        first: int,
        passing: Collection[int] = (),
    ) -> list[int]:
        """Notes the shapes of tensors that are handed out, and returns their numbers.

        Args:
            out: The tensors.
            shapes: Where their shapes are noted.
            numbers: The numbers of all storages.
            first: The number of the first storage that was made here.
            passing: The numbers of tensors that may pass through, as the encoder's output does in
                stages of the decoder, and hidden states in a stage that has no layer.
        """
        found = []
        for x in out:
            entry = None if x is None else self.tracker.entry_of(x)
            number = None if entry is None else numbers[entry]
            if x is None or number is None or number in found:
                raise NotRepeatableError("what is handed out was not made here")
            if number >= first:
                shapes[number] = Shape.of(x)
            elif number not in passing:
                raise NotRepeatableError("what is handed out was not made here")
            found.append(number)
        return found

    def _check(self, recorded: _Recorded) -> None:
        """Checks that a stage has freed all that it has made and not handed out.

        The graph may hold what is left, such as masks and placeholders of joined weights, which
        have one element: it is freed a little later. Gradients of joined weights that need no cast
        are parts of one tensor, which torch frees before or after it calls hooks, depending on
        whether it adds or copies them. So in the last micro-batch, which has hooks, these cannot be
        played by the first one.
        """
        assert recorded.backward is not None
        steps = (*recorded.forward, *recorded.backward)
        freed = {step.number for step in recorded.backward if step.what == "end"}
        ended = {step.number for step in steps if step.what in ("end", "accumulated")}
        for number, entry in enumerate(recorded.numbers.entries):
            handed_out = number in recorded.made or number in recorded.grads
            # What only passes through may be freed between the two passes, when it has been sent.
            sent = number in recorded.numbers_of and entry is not None and entry.died is not None
            handed_out = handed_out or sent
            if number in recorded.copies:
                if number in freed:
                    raise NotRepeatableError(f"{entry} does not stay")
            elif number not in ended and not handed_out and entry is not None and entry.n_bytes:
                if number < len(recorded.entering):
                    raise NotRepeatableError(f"{entry}, which was handed in, stays")
                if _HALF < entry.n_bytes <= _PLACEHOLDER and self.by_first and not self.last_runs:
                    raise NotRepeatableError(f"{entry} may stand for joined weights")
                recorded.with_graph.append(number)
                self._with_graph.append(entry)

    def _check_graph(self) -> None:
        """Checks that what was left after a backward pass was freed with its graph."""
        for entry in self._with_graph:
            if entry.died is None:
                raise NotRepeatableError(f"{entry} stays")
        self._with_graph.clear()

    # ------------------------------------------------------------------ playing

    def _play_forward(
        self, recorded: _Recorded, entering: Activations
    ) -> tuple[Activations, list[Any]]:
        given = [getattr(entering, name) for name in recorded.entering]
        Activations.taken(entering)
        player = Player(self.tracker, given)
        del given
        player.play(recorded.forward, recorded.made)
        out = [player.held[number] for number in recorded.numbers_of]
        leaving = Activations(**dict(zip(recorded.leaving, out)))
        loss = out[len(recorded.leaving) :]
        for number in recorded.numbers_of:
            entry = recorded.numbers.entries[number]
            assert entry is not None
            self._hold(player, number, entry, recorded)
        return leaving, [*loss, _Played(player)]

    def _hold(self, player: Player, number: int, model: Entry, recorded: _Recorded) -> None:
        """Holds what a forward pass has handed out until its backward pass frees it, if it does.

        Whether it does shows when that of the second micro-batch is freed.
        """
        if model.died is None:
            before = self.tracker.when_ended.get(id(model))

            def ended() -> None:
                if before is not None:
                    before()
                if not self._recording:
                    player.held.pop(number, None)

            self.tracker.when_ended[id(model)] = ended
        elif not any(s.what == "end" and s.number == number for s in recorded.backward or ()):
            player.held.pop(number)

    def _play_backward(
        self, recorded: _Recorded, played: _Played, leaves: Mapping[str, Tensor], last: bool
    ) -> None:
        assert recorded.backward is not None, "the model of others comes first"
        hooks = self._call_hooks if last else None
        played.player.play(recorded.backward, recorded.grads, hooks)
        if recorded.with_graph:
            weakref.finalize(played, played.player.end, recorded.with_graph)
        for name, number in recorded.grads_of.items():
            if number not in played.player.held:
                raise NotRepeatableError("its forward pass was played before this was known")
            leaves[name].grad = played.player.held.pop(number)

    def _call_hooks(self, number: int) -> None:
        """Does what torch does when the gradient of a parameter is complete."""
        parameter = self._parameters[number]
        with self.tracker.playing_backward():
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                hook(parameter)  # those of FSDP free nothing outside backward passes


@contextmanager
def passes_once(
    executor: Executor, tracker: MemoryTracker, n_micro: int, by_first: bool, last_runs: bool
) -> Iterator[None]:
    """Lets an executor run only a few micro-batches of a stage, inside the context.

    Args:
        executor: The executor of a pipeline.
        tracker: Keeps the log, in which all micro-batches appear.
        n_micro: The number of micro-batches of a step.
        by_first: Whether the first micro-batch is the model of the others, not the second.
        last_runs: Whether the last micro-batch runs.
    """
    if n_micro < 2 + (not by_first) + last_runs:
        yield
        return
    passes = _Passes(executor, tracker, n_micro, by_first, last_runs)
    with (
        patch.multiple(
            executor, enter=passes.enter, forward=passes.forward, backward=passes.backward
        ),
        patch.multiple(executor.stage_io, slice=passes.slice, receive_buffer=passes.receive_buffer),
        passes.watching_gradients(),
        passes.watching_sums(),
        passes.watching_copies(),
    ):
        yield
