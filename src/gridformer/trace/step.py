"""The record of one optimizer step of a rank: its kernels, messages and storages, in one run.

The rank's own code runs on tensors without memory. The record is cut where the parts of a step end:
passes, messages between stages, sums of gradients, the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from gridformer.checkpoint.block import written_here
from gridformer.checkpoint.checkpoint import shards_of
from gridformer.checkpoint.snapshot import bytes_of
from gridformer.config import RunConfig
from gridformer.models import blocks
from gridformer.models.blocks.cast import CastCopy
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data.zero import replica_part
from gridformer.parallel.pipeline import Event
from gridformer.parallel.pipeline.schedules import Itinerary
from gridformer.parallel.tensor import norm as grid_norms
from gridformer.trace.batch import rows_like
from gridformer.trace.device import Backend
from gridformer.trace.events import Event as TraceEvent
from gridformer.trace.fake import watched_fakes
from gridformer.trace.rank import on_devices
from gridformer.trace.tracker import Change, Entry, MemoryTracker
from gridformer.train.forward_backward import Pipeline
from gridformer.train.step import Stepper
from gridformer.utils.garbage import no_garbage_collection
from gridformer.utils.loops import recorded
from gridformer.utils.torch_private import in_backward

Recorded = TraceEvent | Change

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
# Parts of a step that make neither copies nor gradients.
_MESSAGES = ("send", "recv", "forward sent", "backward sent")
ACTIVATIONS = tuple(f"activations: {kind}" for kind in (*_MODULES, _OUTSIDE))
KINDS = (*STATES, *ACTIVATIONS, "recomputed", "workspace")


class Part(NamedTuple):
    """A part of a step.

    Attributes:
        kind: `forward`, `backward`, `send`, `recv`, `forward sent` and `backward sent` (the end of
            a send), or another part.
        stage: The stage, or -1.
        micro: The micro-batch, or -1.
        events: What is recorded from the end of the part before it to its own end.
    """

    kind: str
    stage: int
    micro: int
    events: Sequence[Recorded]


@dataclass
class StepRecord:
    """The record of a step.

    Attributes:
        parts: The parts of the step, in order.
        between: The bytes held between steps, by kind.
        host: The bytes of the optimizer's state that lie in host memory.
        saved: The bytes of copies from which a checkpoint is written while training goes on.
    """

    parts: list[Part]
    between: dict[str, int]
    host: int = 0
    saved: int = 0


def record_step(
    run: RunConfig,
    rank: int,
    decisions: Decisions,
    backend: Backend,
    complete: bool = True,
    follows: Itinerary | None = None,
    more_rows: int = 0,
) -> StepRecord:
    """Records one optimizer step of a rank.

    It registers a device type in this process, which must not belong to a process group.

    Args:
        run: The checked run.
        rank: The rank.
        decisions: The result of `decide_run` for this run, or for the one that it stands for.
        backend: `nccl` records what a GPU does, `gloo` what a CPU does.
        complete: Whether all turns of loops over chunks run.
        follows: The schedule of the rank in a pipeline, if not that of the layout.
        more_rows: How many more rows of a batch the rank holds; they are read and not used.
    """
    layout, train = run.layout, run.train
    with ExitStack() as stack:
        log = stack.enter_context(on_devices(run, rank, True, backend))
        stack.enter_context(no_garbage_collection())
        axes = build_axes(layout, log.device.type, decisions.block)
        watch = stack.enter_context(watched_fakes(log))
        model = build_parallel(
            run.model,
            layout,
            axes,
            train.seed,
            log.device,
            train.dtype,
            decisions.choices,
            filled=False,
        )
        log.places.name(model)
        stepper = Stepper(model, train, axes, layout)
        if isinstance(stepper.passes, Pipeline):
            executor = stepper.passes.executor
            executor.has_loaded()  # the record is that of a later step
            executor.follows = follows
        updates = stepper.updates
        updates.allocate(0)
        events: list[Any] = log.trace.events
        events.clear()
        tracker = MemoryTracker(device=log.device.type, log=events)
        held: dict[int, Tensor] = {}
        for parameter in model.parameters():
            part = replica_part(parameter)
            held |= {id(p): p for p in (parameter, part) if p is not None}
        states = [t for state in updates.state.values() for t in state.values()]
        tracker.mark(held.values(), "parameters")
        tracker.mark(states, "optimizer")
        between = tracker.live_by_kind()
        in_host = [t for t in states if t.device.type != log.device.type]
        host = sum(t.numel() * t.element_size() for t in in_host) if backend == "nccl" else 0
        done = stack.enter_context(_watching(stepper, tracker, [*held.values()], events))
        stack.enter_context(tracker.resizes())
        begins = len(events)
        watch.storages = tracker
        if not complete:
            stack.enter_context(recorded(partial(_repeated, events)))
        size = axes.batch.size
        rest = rows_like(run, slice(0, more_rows // size)) if more_rows else {}
        rest = {name: x.to(log.device) for name, x in rest.items()}
        stepper(0, partial(rows_like, run))
        del rest  # stands for the other micro-batches: a step reads all at its beginning
        watch.storages = None
        ends = [begins, *(end for end, _ in done), len(events)]
        named = [*(event for _, event in done), Event("", -1, -1, 0.0, 0.0)]
        parts = [
            Part(event.kind, event.stage, event.micro, events[begin:end])
            for begin, end, event in zip(ends, ends[1:], named)
        ]
        saved = 0
        if train.saves_meanwhile:
            saved = bytes_of(written_here(shards_of(model, updates), axes))
        return StepRecord(parts, between, host, saved)


def _repeated(events: list[Recorded], times: int) -> Callable[[], None]:
    """Returns a function that repeats what is recorded from now until it is called."""
    begins = len(events)
    return lambda: events.extend(events[begins:] * times)


@contextmanager
def _watching(
    stepper: Stepper, tracker: MemoryTracker, held: list[Tensor], events: list[Recorded]
) -> Iterator[list[tuple[int, Event]]]:
    """Tells the tracker which module runs, forward or backward, and which tensors are gradients.

    Args:
        stepper: The stepper that will run the step.
        tracker: The memory tracker.
        held: All tensors that can have gradients.
        events: What has been recorded.

    Yields:
        A list that is filled with (number of recorded events at its end, event) for each part of
        the step.
    """
    model = stepper.model
    done: list[tuple[int, Event]] = []
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
        done.append((len(events), event))

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


def kind_of(entry: Entry) -> str:
    """Returns which of `KINDS` a storage is, once the step is over."""
    if entry.kind:
        return entry.kind
    made_in = entry.place.split("|")[0]
    if entry.until_backward:
        return f"activations: {made_in or _OUTSIDE}"
    if entry.in_backward and made_in:
        return "recomputed"
    return "workspace"
