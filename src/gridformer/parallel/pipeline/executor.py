"""Runs one rank's part of a pipeline: the passes of its stages in schedule order, and messages.

A stage puts autograd leaves in front of what it receives, and sends back their gradients. Between
its passes only the leaves, which take no memory, and the edges of the graph are kept. Sends start
as soon as a tensor is computed, and receives are posted one message ahead. A run that is told to
stop leaves out the last micro-batches of a step, the same on all ranks. Their messages are still
sent, with uninitialized content, because their receives may be posted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gridformer.comm import Pending
from gridformer.comm.p2p import P2PChannel
from gridformer.config import LayoutConfig
from gridformer.mesh import Axes
from gridformer.models import Activations, Model
from gridformer.models.blocks.late_gradient import WeightPass, split_backward
from gridformer.parallel.data.fsdp import reshard_layers
from gridformer.parallel.data.gradients import GradientSums
from gridformer.parallel.pipeline.schedules import (
    Action,
    Itinerary,
    actions_of,
    forwards,
    reading_action,
)
from gridformer.parallel.pipeline.stages import LABEL, StageIO, parameters_under, shared_sets
from gridformer.parallel.pipeline.timeline import OnAction, timed
from gridformer.utils.batch import Batch, MicroBatch

# For the last pass of each stage that makes gradients: the parameters that no later pass of this
# rank touches.
# The set may be empty (on other sub-grids in D&SP-cSub).
Completed = dict[Action, set[nn.Parameter]]
# Called by the last stage with the final hidden states of a micro-batch. In training it returns the
# loss.
Finish = Callable[[Tensor, Batch], Tensor | None]
# Called in training before a micro-batch other than the first; returns whether it is left out.
StopsBefore = Callable[[int], bool]
# Runs in which kernels are loaded: in the first one torch compiles for these shapes, and in the
# second one again if what it took for constant is not.
LOADING_RUNS = 2


class Executor:
    """Runs micro-batches through the stages of a pipeline, together with the other ranks.

    Args:
        sums: Sums gradients over replicas, starting in backward passes of the stages.
        on_action: Called with an `Event` after each action, with times of the device.

    Attributes:
        stops_before: See StopsBefore; None leaves out nothing.
        dropped: Whether the last training step left out micro-batches.
        parameters: Those of each of this rank's stages.
        follows: The schedule of this rank, instead of that of the layout; a record of a step has a
            shorter one.
    """

    def __init__(
        self,
        model: Model,
        layout: LayoutConfig,
        axes: Axes,
        sums: GradientSums,
        on_action: OnAction | None = None,
    ) -> None:
        assert len(model.stages) == layout.n_stages, "the model was not cut for this layout"
        self.model, self.layout, self.pp = model, layout, axes.pp
        self.sums, self.on_action = sums, on_action
        self.stops_before: StopsBefore | None = None
        self.dropped = False
        self.follows: Itinerary | None = None
        self.links = model.links()
        self._on_gpu = axes.device_type == "cuda"
        self.stage_io = StageIO(model, layout, axes)
        self.channel = P2PChannel(axes, ring=layout.pipeline_order == "interleaved")
        axes.make_holders(shared_sets(model, layout))
        self._itineraries: dict[tuple[int, bool, bool], tuple[Itinerary, Completed]] = {}
        self._loading_runs = LOADING_RUNS if self.channel.on_device else 0
        self._n_runs: Counter[Hashable] = Counter()  # by the key of `_kernels_of`
        self.parameters = {
            stage: {
                parameter
                for i in model.stages[stage]
                for path in self.links[i].modules
                for parameter in parameters_under(model, path)
            }
            for stage in layout.stages_on(axes.pp.index)
        }

    def train(self, work: Sequence[MicroBatch], finish: Finish) -> None:
        """Runs the forward and backward passes of a step; gradients accumulate in `.grad`."""
        run = _Run(self, work, finish, training=True)
        with split_backward() if run.splits else nullcontext():
            run.go()
        self.dropped = run.left_out < len(work)

    def evaluate(self, work: Sequence[MicroBatch], finish: Finish) -> None:
        """Runs forward passes only."""
        _Run(self, work, finish, training=False).go()

    def count(self, work: Sequence[MicroBatch]) -> None:
        """Runs forward passes before a training step; neither `on_action` nor `follows` count."""
        before = self.on_action, self.follows
        self.on_action = self.follows = None
        _Run(self, work, lambda hidden, batch: None, training=False).go()
        self.on_action, self.follows = before

    def loads(self, training: bool, work: Sequence[MicroBatch]) -> bool:
        """Returns whether a run may load kernels, so that its messages go through the host.

        A kernel that a process launches for the first time is loaded before, and loading may wait
        until the GPU has done all that it was given (CUDA's lazy loading). Over NCCL a receive is a
        kernel, too, which runs until its message comes. If the message depends on what this process
        launches next, both wait forever. A message through the host occupies no GPU.
        """
        return self._n_runs[_kernels_of(training, work)] < self._loading_runs

    def note_run(self, training: bool, work: Sequence[MicroBatch]) -> None:
        """Notes that a run has ended; see `loads`."""
        self._n_runs[_kernels_of(training, work)] += 1

    def has_loaded(self) -> None:
        """Lets all runs send over NCCL, as if the first ones were over."""
        self._loading_runs = 0

    def loads_again(self) -> None:
        """Notes that the next runs may load kernels which the first ones did not; see `loads`.

        All ranks of the pipeline call it together.
        """
        self._n_runs.clear()

    def itinerary(self, m: int, training: bool) -> tuple[Itinerary, Completed]:
        """Returns this rank's actions for m micro-batches, and the gradients each one completes."""
        key = m, training, self.follows is None
        if key not in self._itineraries:
            orders = actions_of(self.layout, m)
            orders = orders if training else forwards(orders)
            actions = self.follows or Itinerary.of(orders, self.pp.index, self.layout)
            self._itineraries[key] = actions, self._completed(actions)
        return self._itineraries[key]

    def _completed(self, itinerary: Itinerary) -> Completed:
        left: set[nn.Parameter] = set().union(*self.parameters.values())
        ended: set[int] = set()
        completed = {}
        for action in reversed(itinerary.actions):
            if action.kind != "forward" and action.stage not in ended:
                ended.add(action.stage)
                completed[action] = left & self.parameters[action.stage]
                left -= completed[action]
        return completed

    def timed(self, kind: str, action: Action) -> AbstractContextManager[None]:
        """Reports the enclosed work as an `Event` of that kind."""
        return timed(self.on_action, kind, action.stage, action.micro, self._on_gpu)


class _Run:
    """One pass through an itinerary: a training step or an evaluation."""

    def __init__(
        self,
        executor: Executor,
        work: Sequence[MicroBatch],
        finish: Finish,
        training: bool,
    ) -> None:
        itinerary, complete = executor.itinerary(len(work), training)
        self.executor, self.itinerary, self.work = executor, itinerary, work
        self.finish, self.training = finish, training
        self.left_out = len(work)  # micro-batches from this number on are left out
        self.model, self.stage_io = executor.model, executor.stage_io
        self.complete = complete
        self.splits = any(action.kind == "weight" for action in itinerary.actions)
        self._kept: dict[tuple[int, int], tuple[dict[str, Tensor], list[Any]]] = {}
        self._left: dict[tuple[int, int], WeightPass] = {}
        self._queues = {peer: deque(coming) for peer, coming in itinerary.arrivals.items()}
        self._sender = {a: peer for peer, coming in itinerary.arrivals.items() for a in coming}
        self._coming: dict[Action, tuple[dict[str, Tensor], list[Pending]]] = {}
        self._passed: dict[Action, list[Tensor]] = {}  # from one stage of this rank to the next
        self._sent: dict[Action, list[Pending]] = {}

    def go(self) -> None:
        loads = self.executor.loads(self.training, self.work)
        with self.executor.channel.through_host() if loads else nullcontext():
            for peer in () if self.stage_io.absent else self._queues:
                self._post_receive(peer)
            does = {"forward": self._forward, "backward": self._backward, "weight": self._weight}
            for action in self.itinerary.actions:
                does[action.kind](action)
            for message in [*self._sent]:
                self._finish_send(message)
        self.executor.note_run(self.training, self.work)

    def _leaves_out(self, micro: int) -> bool:
        """Returns whether a micro-batch is left out, at the stop point before its forward pass."""
        stops_before = self.executor.stops_before
        may_stop = self.training and 0 < micro < self.left_out
        if may_stop and stops_before and stops_before(micro):
            self.left_out = micro
        return micro >= self.left_out

    def _send_empty(self, action: Action, stage: int) -> None:
        """Sends what would enter a stage, or its gradients, without having computed them.

        Nobody reads it, and a kernel that fills it would perhaps be loaded here; see
        `Executor.loads`.
        """
        inputs = self.stage_io.entering(stage, self.work[action.micro].batch)
        self._send(action, [*inputs.values()])

    def _forward(self, action: Action) -> None:
        stage, micro = action.stage, self.work[action.micro]
        entered = self._receive(action) if stage else {}
        if self._leaves_out(action.micro):
            if stage < len(self.model.stages) - 1:
                self._send_empty(action, stage + 1)
            return
        leaves = {}
        if self.training:  # each leaf holds a single element; no name here keeps an input
            leaves = {
                n: x.new_empty(()).expand(x.shape).requires_grad_() for n, x in entered.items()
            }
            entered = {name: _Enter.apply(leaves[name], x) for name, x in entered.items()}
        with self.executor.timed("forward", action):
            self.model.dropout_rng.at(micro.rows)
            entering = Activations(**entered)
            del entered
            links = [self.executor.links[i].name for i in self.model.stages[stage]]
            leaving = self.model.run(micro.batch, entering, links)
            last, made, roots = stage == len(self.model.stages) - 1, [], list[Any]()
            if last:
                assert leaving.hidden is not None
                roots = [self.finish(leaving.hidden, micro.batch)]
            else:
                made = [getattr(leaving, name) for name in self.stage_io.names(stage + 1)]
                if torch.is_grad_enabled():  # edges: backward needs none of the tensors sent
                    roots = [get_gradient_edge(x) for x in made]
            del entering, leaving
        if not last:
            self._send(action, made)
        if self.training:
            self._kept[stage, action.micro] = leaves, roots

    def _backward(self, action: Action) -> None:
        at_end = action.stage == len(self.model.stages) - 1
        grads = None if at_end else [*self._receive(action).values()]
        if action.micro >= self.left_out:
            if action.stage:
                self._send_empty(action, action.stage)
            return
        leaves, roots = self._kept.pop((action.stage, action.micro))
        with self.executor.timed("backward", action):
            self.model.dropout_rng.at(self.work[action.micro].rows)  # for recomputed blocks
            left = WeightPass()
            with left.open() if self.splits else self._summing(action)[0]:
                torch.autograd.backward(roots, grads)
            if self.splits:
                self._left[action.stage, action.micro] = left
                reshard_layers(self.model)
            made = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves.values()]
            del grads, leaves, roots
        if action.stage:
            self._send(action, made)

    def _weight(self, action: Action) -> None:
        if action.micro >= self.left_out:
            return
        with self.executor.timed("weight", action):
            left = self._left.pop((action.stage, action.micro))
            summing, reached = self._summing(action)
            with summing:
                self.executor.sums.complete(reached - left.parameters)
                left.run()

    def _summing(self, action: Action) -> tuple[AbstractContextManager[None], set[nn.Parameter]]:
        """Returns in what a pass makes gradients, and whose gradients it may complete."""
        completed = self.complete.get(action)  # an empty set counts, too
        last = completed is not None
        reached = completed if completed is not None else self.executor.parameters[action.stage]
        return self.executor.sums.backward(last, reached), reached

    # ------------------------------------------------------------------ messages

    def _send(self, action: Action, made: list[Tensor]) -> None:
        """Sends tensors, which are taken out of their list."""
        if self.stage_io.absent:
            return
        if action not in self.itinerary.sends:
            reader = reading_action(action, len(self.model.stages))
            assert reader is not None
            self._passed[reader] = [x.detach() for x in made]
            return
        message, to = self.itinerary.sends[action]
        with self.executor.timed("send", action):
            sent = self._sent[message] = []
            while made:
                sent.append(self.executor.channel.send(self.stage_io.slice(made.pop(0)), to, LABEL))

    def _receive(self, action: Action) -> dict[str, Tensor]:
        """Receives the inputs of an action, by their names in `Activations`."""
        if self.stage_io.absent:
            return self._empty_inputs(action)
        if action in self._passed:
            return dict(zip(self.stage_io.names(_entered(action)), self._passed.pop(action)))
        peer = self._sender[action]
        while action not in self._coming:
            self._post_receive(peer)
        self._post_receive(peer)  # the next message travels during this action
        entering, pending = self._coming.pop(action)
        with self.executor.timed("recv", action):
            for x, message in zip(entering.values(), pending):
                self.stage_io.fill(x, message.wait())
        for through in self.itinerary.taken[action]:
            self._finish_send(through)
        return entering

    def _post_receive(self, peer: int) -> None:
        """Posts the receive of the next message from a rank, if there is one."""
        if not self._queues[peer]:
            return
        action = self._queues[peer].popleft()
        channel, buffer = self.executor.channel, self.stage_io.receive_buffer
        with self.executor.timed(f"{action.kind} posted", action):
            entering = self._empty_inputs(action)
            pending = [channel.receive(buffer(x), peer, LABEL) for x in entering.values()]
            self._coming[action] = entering, pending

    def _empty_inputs(self, action: Action) -> dict[str, Tensor]:
        """Allocates by name the inputs of a forward pass, or a backward pass's output gradients."""
        return self.stage_io.entering(_entered(action), self.work[action.micro].batch)

    def _finish_send(self, message: Action) -> None:
        """Waits for a message that its reader has received, and frees its memory."""
        if message in self._sent:
            with self.executor.timed(f"{message.kind} sent", message):
                started = self._sent.pop(message)
                while started:
                    started.pop(0).wait()


def _entered(action: Action) -> int:
    """Returns the stage whose inputs, or their gradients, a pass receives."""
    return action.stage + (action.kind == "backward")


def _kernels_of(training: bool, work: Sequence[MicroBatch]) -> Hashable:
    """Returns a key that is equal for runs that launch the same kernels."""
    return training, *(x.shape for x in work[0].batch.values())


class _Enter(torch.autograd.Function):
    """Returns x to the stage, and passes its gradient to the leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None
