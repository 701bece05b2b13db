"""The record of one optimizer step of a rank: its kernels, messages and storages, in one run.

The rank's own code runs on tensors without memory. The record is cut where the parts of a step end:
passes, messages between stages, sums of gradients, the update.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from traceback import extract_tb
from typing import Any, Literal, NamedTuple, cast

from torch import Tensor, nn

from gridformer.checkpoint.blocks import bytes_of, written_here
from gridformer.checkpoint.checkpoint import shards_of
from gridformer.comm import recorder
from gridformer.config import RunConfig
from gridformer.models import blocks
from gridformer.models.blocks.cast import CastCopy
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data.zero import replica_part
from gridformer.parallel.pipeline import Event
from gridformer.parallel.pipeline.schedules import PASSES, Itinerary
from gridformer.parallel.tensor.norm import GridNorm
from gridformer.record.batch import rows_like
from gridformer.record.device import NAME, Backend
from gridformer.record.events import (
    Awaited,
    Held,
    Kernel,
    Read,
    SingleEvent,
    Start,
    Trace,
    Trouble,
    Wait,
)
from gridformer.record.fake import watched_fakes
from gridformer.record.fusion import Fusion
from gridformer.record.group import Log, recording
from gridformer.record.place import Places
from gridformer.record.tracker import Entry, MemoryTracker
from gridformer.train.compile import why_uncompiled
from gridformer.train.muon import Muon
from gridformer.train.step import Stepper
from gridformer.utils.errors import UserError
from gridformer.utils.process import no_garbage_collection
from gridformer.utils.tensors import shortened_loops
from gridformer.utils.torch_private import in_backward

Recorded = Start | Awaited | Kernel | Read | Held
Extent = Literal["composed", "few layers", "all layers", "complete"]

# The errors of versions of torch when tensors of two devices meet.
_MIXES = ("two devices", "two different devices", "two types of devices", "same device")
# The errors that torch raises if an operation cannot be run without the values of a tensor.
_NEEDS_VALUES = (
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
)
_HERE = str(Path(__file__).parent)

STATES = ("parameters", "gradients", "optimizer")
# An activation belongs to the innermost of these modules in which it was made.
_MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "attention": (blocks.Attention, blocks.CrossAttention),
    "feed-forward": (blocks.FeedForward, blocks.GatedFeedForward, blocks.MixtureOfExperts),
    "norms": (blocks.LayerNorm, blocks.RMSNorm, blocks.HeadNorm, GridNorm),
    "residuals": (blocks.Layer,),
}
_OUTSIDE = "embedding, loss"
# Parts of a step that make neither copies nor gradients.
MESSAGES = ("send", "recv", *(f"{kind} {what}" for kind in PASSES for what in ("posted", "sent")))
ACTIVATIONS = tuple(f"activations: {kind}" for kind in (*_MODULES, _OUTSIDE))
KINDS = (*STATES, *ACTIVATIONS, "recomputed", "workspace")


class RecordOptions(NamedTuple):
    """What of a step is recorded.

    Attributes:
        backend: `nccl` records what a GPU does, `gloo` what a CPU does.
        kernels: Whether kernels and read-backs are recorded, too.
        storages: Whether memory is recorded.
        training: Whether it is an optimizer step; otherwise an evaluation of one global batch.
        extent: `composed` is the whole step, of which few layers and passes run. With `few layers`
            it has only the layers that run, and with `all layers` all of them run, so that events
            have their names. `complete` runs every pass and every turn of loops over chunks, too.
        until: The time (`time.monotonic`) after which no step is begun.
    """

    backend: Backend = "nccl"
    kernels: bool = False
    storages: bool = False
    training: bool = True
    extent: Extent = "composed"
    until: float = math.inf


class StepPart(NamedTuple):
    """A part of a step, from the end of the part before it to its own end.

    Attributes:
        kind: `start` for what comes before the step; one of `PASSES`; one of `MESSAGES` (where a
            receive is posted, `recv` waits for it, and `forward sent` for a send); or another part
            of the step. It is empty for what comes after it.
        events: Their messages have no numbers, so that parts can be put together anew.
    """

    kind: str
    events: tuple[Recorded, ...]


@dataclass
class StepRecord:
    """The record of a step.

    Attributes:
        trace: All events but those of memory.
        parts: The parts of the step, in order; none if the code raised an error.
        between: The bytes held between steps, by kind.
        host: The bytes of the optimizer's state that lie in host memory.
        saved: The bytes of copies from which a checkpoint is written while training goes on.
        composed: Whether some layers stand for others, whose names events then have.
    """

    trace: Trace
    parts: list[StepPart] = field(default_factory=list)
    between: dict[str, int] = field(default_factory=dict)
    host: int = 0
    saved: int = 0
    composed: bool = False


def record_step(
    run: RunConfig,
    rank: int,
    decisions: Decisions,
    how: RecordOptions,
    follows: Itinerary | Sequence[int] | None = None,
    more: Mapping[str, int] | None = None,
) -> StepRecord:
    """Records one step of a rank.

    It registers a device type in this process, which must not belong to a process group. An error
    of the code is the last trouble of the record's trace, which ends with it.

    Args:
        run: The checked run.
        rank: The rank.
        decisions: The result of `decide_run` for this run, or for the one that it stands for.
        how: What is recorded; with storages also kernels.
        follows: What the rank runs, if not all of the step: a schedule of a pipeline, or some
            micro-batches without one.
        more: By links of layers, for how many other layers Muon updates their matrices, too.
    """
    layout, train = run.layout, run.train
    with ExitStack() as stack:
        kernels = how.kernels or how.storages
        log = stack.enter_context(on_devices(run, rank, kernels, how.backend))
        stack.enter_context(no_garbage_collection())
        record = StepRecord(log.trace)
        events: list[Any] = log.trace.events
        try:
            axes = build_axes(layout, log.device.type, decisions.block)
            watch = stack.enter_context(watched_fakes(log))
            of_run = train.seed, log.device, train.dtype, decisions.choices
            model = build_parallel(run.model, layout, axes, *of_run, filled=False)
            log.places.name(model)
            stepper = Stepper(model, train, axes, layout)
            stepper.executor.has_loaded()  # the record is that of a later step
            stepper.executor.follows = cast("Any", follows)
            stepper.updates.around = log.update
            stepper.updates.allocate(0)
            _repeat_matrices(stepper, more or {})
            if kernels:  # those of a step alone
                events.clear()
            log.trace.reads.clear()
            if kernels and log.nccl and not why_uncompiled(run, "cuda"):
                log.fusion = Fusion(model, events)
            begins = len(events)
            done: list[tuple[int, Event]] = []
            stepper.executor.on_action = lambda event: done.append((len(events), event))
            if how.storages:
                tracker = MemoryTracker(log.device.type)
                _follow(stepper, tracker, _mark_states(stepper, tracker, record))
                stack.enter_context(tracker.resizes())
                tracker.log, watch.storages = events, tracker
            if how.extent != "complete":
                stack.enter_context(shortened_loops(log.repeats))
            if how.training:
                stepper(0, partial(rows_like, run))
            else:
                stepper.evaluate([partial(rows_like, run)])
            watch.storages = None
            log.ends_kernel()
            record.parts = _parts(events, begins, done)
            if train.saves_meanwhile and how.storages:
                record.saved = bytes_of(written_here(shards_of(model, stepper.updates), axes))
            log.trace.complete = True
            # Hooks keep the model alive in cycles that the garbage collector does not see.
            for parameter in model.parameters():
                (parameter._post_accumulate_grad_hooks or {}).clear()
        except UserError:
            raise
        except Exception as error:  # whatever the code of a step raises is a finding
            kind, text = _said(error)
            log.trace.troubles.append(Trouble(kind, text, log.places.of_error(error)))
    if "add up gradients" in (ends := [part.kind for part in record.parts]):
        before = record.parts[: ends.index("add up gradients")]
        log.trace.update = sum(not isinstance(e, Held) for part in before for e in part.events)
    if how.storages:  # a new list, for storages may end later
        log.trace.events = [event for event in events if not isinstance(event, Held)]
    return record


def _repeat_matrices(stepper: Stepper, more: Mapping[str, int]) -> None:
    """Lets Muon update matrices of layers again, in place of those of layers that are left out."""
    here = dict(stepper.model.named_modules())
    times = {
        parameter: more[link.name]
        for link in stepper.model.links()
        if link.name in more
        for path in link.modules
        if path in here
        for parameter in here[path].parameters()
    }
    for optimizer in stepper.updates.units[-1].optimizers:
        for alike in optimizer.alike if isinstance(optimizer, Muon) else ():
            alike += [one for one in alike for _ in range(times.get(one.parameter, 0))]


def _mark_states(stepper: Stepper, tracker: MemoryTracker, record: StepRecord) -> list[Tensor]:
    """Tells the tracker of parameters and optimizer state; returns what can have gradients."""
    held: dict[int, Tensor] = {}
    for parameter in stepper.model.parameters():
        part = replica_part(parameter)
        held |= {id(p): p for p in (parameter, part) if p is not None}
    states = [t for state in stepper.updates.state.values() for t in state.values()]
    tracker.mark(held.values(), "parameters")
    tracker.mark(states, "optimizer")
    record.between = tracker.live_by_kind()
    if stepper.device.type == NAME:
        in_host = [t for t in states if t.device.type != NAME]
        record.host = sum(t.numel() * t.element_size() for t in in_host)
    return [*held.values()]


def _parts(
    events: Sequence[SingleEvent | Held], begins: int, done: Sequence[tuple[int, Event]]
) -> list[StepPart]:
    """Divides events into parts: those before the step, and those until the end of each part."""
    left: dict[Hashable, list[int]] = defaultdict(list)
    likes: dict[int, Hashable] = {}

    def relative(event: SingleEvent | Held) -> Recorded:
        if isinstance(event, Held):
            return Held(event.n_bytes, kind_of(event.kind), event.doing)
        if isinstance(event, Start):
            likes[event.number] = event.like
            left[event.like].append(event.number)
            return event.numbered(0)
        if isinstance(event, Wait):
            like = likes[event.number]
            nth = left[like].index(event.number)
            del left[like][nth]
            return Awaited(like, nth, event.place)
        return event

    ends = [0, begins, *(end for end, _ in done), len(events)]
    kinds = ["start", *(event.kind for _, event in done), ""]
    return [
        StepPart(kind, tuple(_frees_sorted(map(relative, events[begin:end]))))
        for kind, begin, end in zip(kinds, ends, ends[1:])
    ]


def _frees_sorted(events: Iterable[Recorded]) -> Iterator[Recorded]:
    """Sorts frees that follow each other, whose order says nothing and differs between layers."""
    frees = groupby(events, lambda x: isinstance(x, Held) and x.n_bytes < 0 and (x.doing,))
    for freed, some in frees:
        yield from sorted(some, key=lambda x: freed and (x.kind, x.n_bytes))  # type: ignore[union-attr]


def _follow(stepper: Stepper, tracker: MemoryTracker, held: list[Tensor]) -> None:
    """Tells the tracker which module runs, forward or backward, and which tensors are gradients."""
    model, told = stepper.model, stepper.executor.on_action
    assert told is not None
    stack: list[str] = []

    def copies_of(parameters: Iterable[nn.Parameter]) -> list[CastCopy]:
        return [copy for p in parameters if (copy := blocks.copy_of(p)) is not None]

    def mark_copies(copies: Iterable[CastCopy]) -> None:
        tracker.mark((copy.value for copy in copies if copy.value is not None), "parameters")

    def watch(module: nn.Module, kind: str, name: str) -> None:
        copies = copies_of(module.parameters())

        def enters(*_: Any) -> None:
            mark_copies(copies)
            stack.append(tracker.place)
            again = "again, " if in_backward() else ""
            tracker.at(f"{kind}|{again}forward of {name}")

        def leaves(_: nn.Module, __: Any, out: Any) -> None:
            mark_copies(copies)
            tracker.at(stack.pop())
            if isinstance(module, blocks.Layer) and isinstance(out, Tensor) and out.requires_grad:
                out.register_hook(lambda _: tracker.at(f"|backward of {name}"))

        module.register_forward_pre_hook(enters, prepend=True)
        module.register_forward_hook(leaves, always_call=True)

    def accumulated(owner: nn.Parameter) -> None:
        mark_copies(copies_of([owner]))
        if owner.grad is not None:
            tracker.mark([owner.grad], "gradients")

    def was_done(event: Event) -> None:
        tracker.at("")
        if event.kind not in MESSAGES:
            mark_copies(copies)
            tracker.mark((p.grad for p in held if p.grad is not None), "gradients")
        told(event)

    copies = copies_of(model.parameters())
    for name, module in model.named_modules():
        kinds = (kind for kind, types in _MODULES.items() if isinstance(module, types))
        if kind := next(kinds, ""):
            watch(module, kind, name)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(accumulated)
    stepper.executor.on_action = was_done


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


@contextmanager
def on_devices(
    run: RunConfig, rank: int, kernels: bool = False, backend: Backend = "nccl"
) -> Iterator[Log]:
    """Makes this process a rank of the run's group of devices, and yields the log of it."""
    places = Places()
    log = Log(Trace(rank), places, kernels, backend)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # torch only warns of these, and a GPU stops at them.
        warnings.filterwarnings("error", message=".*at least two types of devices")
        if run.layout.n_processes > 1:
            stack.enter_context(recording(log, run.layout.n_processes))
        # `gridformer.comm` tells the log the axis and the purpose of each message.
        log.recorder = stack.enter_context(recorder.record_messages())
        stack.enter_context(places.watching())
        yield log


def _said(error: Exception) -> tuple[str, str]:
    """Returns the kind of an error of a step, and its text."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0].replace(NAME, "cuda")
    if any(words in text for words in _MIXES):
        return "device", text
    # A step on real tensors would not have some errors: torch needs values, which fake tensors do
    # not have, or the code of a trace raises it.
    where = [frame.filename for frame in extract_tb(error.__traceback__)][-1:]
    of_trace = type(error).__name__ in _NEEDS_VALUES or any(
        name.startswith(_HERE) for name in where
    )
    return ("untraced" if of_trace else "error"), text
