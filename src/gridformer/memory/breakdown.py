"""The memory of one rank during an optimizer step, by kind and over time.

parameters, gradients, optimizer    kept from step to step; the parameters with the copies in the
                                    type of the computation that a step makes of them
activations                         made in a forward pass and kept for its backward pass, by the
                                    kind of module that made them
recomputed                          activations that a backward pass recomputes
workspace                           everything else: tensors that live within one pass, and messages
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from gridformer.memory.tracker import Entry, MemoryTracker
from gridformer.models import blocks
from gridformer.models.blocks.cast import CastCopy
from gridformer.models.blocks.recompute import in_backward
from gridformer.parallel.data.zero import replica_part
from gridformer.parallel.pipeline import Event
from gridformer.parallel.tensor import norm as grid_norms
from gridformer.train.step import Stepper

STATES = ("parameters", "gradients", "optimizer")
# An activation belongs to the innermost of these modules in which it was made.
_MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "attention": (blocks.Attention, blocks.CrossAttention),
    "feed-forward": (blocks.FeedForward, blocks.GatedFeedForward),
    "norms": (
        *(blocks.LayerNorm, blocks.RMSNorm, blocks.HeadNorm),
        *(grid_norms.GridLayerNorm, grid_norms.GridRMSNorm),
    ),
    "residuals": (blocks.Layer,),
}
_OUTSIDE = "embedding, loss"
_MESSAGES = ("send", "recv")  # events of a step that make neither copies nor gradients
ACTIVATIONS = tuple(f"activations: {kind}" for kind in (*_MODULES, _OUTSIDE))
KINDS = (*STATES, *ACTIVATIONS, "recomputed", "workspace")
# Prepares a step for repeating in the log what it need not run again; see gridformer.memory.once.
Once = Callable[[Stepper, MemoryTracker], AbstractContextManager[object]]
_POINTS = 1500  # points of a timeline


@dataclass(frozen=True)
class Timeline:
    """Bytes over time, by kind.

    Time counts allocations and frees. The timeline is divided into intervals, and the moment with
    the most bytes represents each of them.

    Attributes:
        times: The moments.
        bytes_of: For each kind, its bytes at these moments.
        phases: (time at which a phase of the step begins, its name).
    """

    times: list[int]
    bytes_of: dict[str, list[int]]
    phases: list[tuple[int, str]]


@dataclass(frozen=True)
class MemoryBreakdown:
    """The bytes of one rank during one optimizer step.

    Attributes:
        rank: The rank.
        peak: The most bytes that it holds at a time.
        moment: What the rank was doing at the peak.
        by_kind: The bytes at the peak by kind.
        between: The bytes held between steps.
        host: The bytes that lie in host memory (train.offload). No other number contains them.
        timeline: The bytes over time.
        saved: The bytes of the copies from which a checkpoint is written while training goes on
            (train.async_save), in host memory. No other number contains them.
        saved_beside: Whether these copies lie in the same memory as all else, as on CPUs.
    """

    rank: int
    peak: int
    moment: str
    by_kind: dict[str, int]
    between: int
    host: int
    timeline: Timeline = field(repr=False)
    saved: int = 0
    saved_beside: bool = False

    @property
    def needed(self) -> int:
        """The bytes that the device of the rank must have."""
        return self.peak + (self.saved if self.saved_beside else 0)

    @property
    def activations(self) -> int:
        """The bytes of all activations at the peak."""
        return sum(self.by_kind.get(kind, 0) for kind in ACTIVATIONS)


@dataclass(frozen=True)
class StepLog:
    """The log of one optimizer step of a rank.

    Attributes:
        tracker: Keeps the log.
        phases: (time of its end, name) for each phase of the step.
        between: The bytes held between steps.
        start: The time at which the step begins.
        host: The bytes that lie in host memory.
        saved: See `MemoryBreakdown`.
        saved_beside: See `MemoryBreakdown`.
    """

    tracker: MemoryTracker
    phases: list[tuple[int, str]]
    between: int
    start: int
    host: int
    saved: int = 0
    saved_beside: bool = False


def log_step(
    stepper: Stepper,
    step: Callable[[], object],
    host: Sequence[Tensor] = (),
    once: Once | None = None,
    remembered: Callable[..., Any] | None = None,
) -> StepLog:
    """Runs one optimizer step and returns its log.

    Args:
        stepper: The stepper, whose optimizer state must already be allocated.
        step: Runs the step.
        host: The tensors of the optimizer state that lie in host memory in a real run.
        once: Makes the step run its repeated parts only once; None runs the complete step. With it
            the step computes no values, so it is for tensors without memory.
        remembered: See `MemoryTracker`.

    Raises:
        NotRepeatableError: With `once`, something cannot be repeated in the log.
    """
    tracker = MemoryTracker(remembered)
    model, updates = stepper.model, stepper.updates
    held: dict[int, Tensor] = {}
    for parameter in model.parameters():
        part = replica_part(parameter)
        held |= {id(p): p for p in (parameter, part) if p is not None}
    tracker.mark(held.values(), "parameters")
    tracker.mark((t for state in updates.state.values() for t in state.values()), "optimizer")
    in_host = tracker.leave_out(host)
    between, start = tracker.live(), tracker.now
    with ExitStack() as stack:
        done = stack.enter_context(_watching(stepper, tracker, [*held.values()]))
        if once is not None:
            stack.enter_context(once(stepper, tracker))
        stack.enter_context(tracker)
        step()
    return StepLog(tracker, done, between, start, in_host)


def breakdown_of(log: StepLog, rank: int, timeline: bool = True) -> MemoryBreakdown:
    """Returns the breakdown of a step.

    Args:
        log: The log of the step.
        rank: The rank, for the result.
        timeline: Whether the breakdown has its timeline, which takes time to make.
    """
    tracker = log.tracker
    when, peak = tracker.peak()
    by_kind = Counter[str]()
    for entry in tracker.alive_at(when):
        by_kind[_kind(entry)] += entry.n_bytes
    return MemoryBreakdown(
        rank,
        peak,
        _moment(tracker, when, log.phases),
        {kind: by_kind[kind] for kind in KINDS if by_kind[kind]},
        log.between,
        log.host,
        _timeline(tracker, log.start, log.phases) if timeline else Timeline([], {}, []),
        log.saved,
        log.saved_beside,
    )


@contextmanager
def _watching(
    stepper: Stepper, tracker: MemoryTracker, held: list[Tensor]
) -> Iterator[list[tuple[int, str]]]:
    """Tells the tracker which module runs, forward or backward, and which tensors are gradients.

    Args:
        stepper: The stepper that will run the step.
        tracker: The memory tracker.
        held: All tensors that can have gradients.

    Yields:
        A list that is filled with (time of its end, name) for each phase of the step.
    """
    model = stepper.model
    done: list[tuple[int, str]] = []
    stack: list[str] = []
    handles: list[Any] = []

    def copies_of(parameters: Iterable[nn.Parameter]) -> list[CastCopy]:
        return [copy for p in parameters if (copy := blocks.copy_of(p)) is not None]

    def mark_copies(copies: Iterable[CastCopy]) -> None:
        tracker.mark((copy.value for copy in copies if copy.value is not None), "parameters")

    def enters(kind: str, name: str, copies: list[CastCopy]) -> Callable[..., None]:
        def before(*_: Any) -> None:
            mark_copies(copies)
            stack.append(tracker.place)
            again = "again, " if in_backward() else ""
            tracker.at(f"{kind}|{again}forward of {name}")

        return before

    def leaves(is_layer: bool, name: str, copies: list[CastCopy]) -> Callable[..., None]:
        def after(module: nn.Module, _: Any, out: Any) -> None:
            mark_copies(copies)
            tracker.at(stack.pop())
            if is_layer and isinstance(out, Tensor) and out.requires_grad:
                out.register_hook(lambda _: tracker.at(f"|backward of {name}"))

        return after

    def marked(owner: nn.Parameter) -> None:
        mark_copies(copies_of([owner]))
        if owner.grad is not None:
            tracker.mark([owner.grad], "gradients")

    def was_done(event: Event) -> None:
        tracker.at("")
        if event.kind not in _MESSAGES:
            mark_copies(copies)
            tracker.mark((p.grad for p in held if p.grad is not None), "gradients")
        done.append((tracker.now, event.kind))

    copies = copies_of(model.parameters())
    for name, module in model.named_modules():
        for kind, types in _MODULES.items():
            if isinstance(module, types):
                own = copies_of(module.parameters())
                before = enters(kind, name, own)
                handles.append(module.register_forward_pre_hook(before, prepend=True))
                after = leaves(isinstance(module, blocks.Layer), name, own)
                handles.append(module.register_forward_hook(after, always_call=True))
                break
    for parameter in model.parameters():
        handles.append(parameter.register_post_accumulate_grad_hook(marked))
    stepper.passes.on_action = was_done
    try:
        yield done
    finally:
        stepper.passes.on_action = None
        for handle in handles:
            handle.remove()


def _moment(tracker: MemoryTracker, when: int, done: list[tuple[int, str]]) -> str:
    """Names the module that ran at a time, or else the phase of the step."""
    _, _, doing = tracker.place_at(when).partition("|")
    if doing:
        return doing
    part = next((kind for end, kind in done if end >= when), "")
    passes = {"forward": "forward, embedding or loss", "backward": "backward, embedding or loss"}
    return passes.get(part, part or "between steps")


def _kind(entry: Entry) -> str:
    if entry.kind:
        return entry.kind
    made_in = entry.place.split("|")[0]
    if entry.until_backward:
        return f"activations: {made_in or _OUTSIDE}"
    if entry.in_backward and made_in:
        return "recomputed"
    return "workspace"


def _timeline(tracker: MemoryTracker, start: int, done: list[tuple[int, str]]) -> Timeline:
    end = tracker.now + 1
    rows = {kind: np.zeros(end + 1, dtype=np.int64) for kind in KINDS}
    for entry in tracker.entries:
        row = rows[_kind(entry)]
        row[entry.born] += entry.n_bytes
        row[end if entry.died is None else entry.died] -= entry.n_bytes
    curves = {kind: row.cumsum()[start:end] for kind, row in rows.items()}
    total: NDArray[np.int64] = np.sum([*curves.values()], axis=0)
    edges = np.unique(np.linspace(0, len(total), min(_POINTS, len(total)) + 1).astype(int))
    kept = [a + int(total[a:b].argmax()) for a, b in itertools.pairwise(edges)]
    phases: list[tuple[int, str]] = []
    begins = 0
    for ended, kind in done:
        if not phases or phases[-1][1] != kind:
            phases.append((begins, kind))
        begins = max(0, ended - start)
    return Timeline(
        kept,
        {kind: curve[kept].tolist() for kind, curve in curves.items() if curve.any()},
        phases,
    )
