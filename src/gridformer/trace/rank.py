"""Runs one optimizer step of one rank on fake GPU tensors, in the real code, and records it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any

from gridformer.comm import recorder
from gridformer.config import RunConfig
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.parallel.axes import build_axes
from gridformer.trace.batch import rows_like
from gridformer.trace.chunks import trace_chunks_once
from gridformer.trace.device import NAME, Backend, fake_gpu
from gridformer.trace.events import Trace, Trouble
from gridformer.trace.fake import watched_fakes
from gridformer.trace.fewer_micro_batches import trace_again
from gridformer.trace.group import Log, recording
from gridformer.trace.known_stages import KnownStages
from gridformer.trace.micro_batches import MicroBatches, fewer
from gridformer.trace.place import Places
from gridformer.trace.products_once import products_once
from gridformer.trace.repeat import Repeats
from gridformer.train.forward_backward import Pipeline, WholeModel
from gridformer.train.step import Stepper
from gridformer.utils.errors import UserError

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


@dataclass
class Played:
    """A trace and what made it.

    Attributes:
        trace: The trace.
        repeats: The passes of the pipeline, if they were recorded.
        fewer: The same of the step with fewer micro-batches, if that was asked for and follows from
            the passes.
    """

    trace: Trace
    repeats: Repeats | None = None
    fewer: Played | None = None


def trace_rank(
    run: RunConfig,
    rank: int,
    decisions: Decisions | None = None,
    repeat: bool = False,
    kernels: bool = False,
    backend: Backend = "nccl",
    training: bool = True,
) -> Trace:
    """Traces one optimizer step of one rank, as it would run on GPUs over NCCL.

    It registers a device type in this process, so call it in a process of its own (see
    `trace_ranks`), which must not belong to a process group.

    Args:
        run: The checked run.
        rank: The rank.
        decisions: The result of `decide_run(run)`; None calls it.
        repeat: Whether equal micro-batches are traced once and repeated; without a pipeline only
            where kernels are recorded.
        kernels: Whether kernels and read-backs are among the events, too.
        backend: `gloo` traces the step as it would run on CPUs over gloo.
        training: Whether it is an optimizer step; otherwise an evaluation of one global batch.

    Returns:
        The trace. An error of the code is its last trouble, and the trace ends with it.
    """
    return play(run, rank, decisions or decide_run(run), repeat, kernels, backend, training).trace


def play(
    run: RunConfig,
    rank: int,
    decisions: Decisions,
    repeat: bool,
    kernels: bool = False,
    backend: Backend = "nccl",
    training: bool = True,
    also: RunConfig | None = None,
    known: KnownStages | None = None,
) -> Played:
    """Traces a rank; see `trace_rank`.

    Args:
        run, rank, decisions, repeat, kernels, backend, training: See `trace_rank`.
        also: The run with fewer micro-batches, whose step is traced, too.
        known: The stages that other ranks have recorded. Those of this rank are added.
    """
    more = run.layout.micro_batches
    if repeat and kernels and training:
        run = fewer(run)
    more -= run.layout.micro_batches
    layout, train = run.layout, run.train
    with ExitStack() as stack:
        log = stack.enter_context(on_devices(run, rank, kernels, backend))
        played = Played(log.trace)
        try:
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
                stepper.passes.executor.has_loaded()  # a trace is that of a later step
            if repeat:
                stack.enter_context(trace_chunks_once(log, watch.count))
                stack.enter_context(products_once(log, watch.count))
            if repeat and isinstance(stepper.passes, Pipeline):
                executor = stepper.passes.executor
                played.repeats = Repeats(
                    model, executor, log, watch.count, known=known, training=training
                )
            _mark_update(stepper, log)
            if kernels:  # those of a step alone
                stepper.updates.allocate(0)
                log.trace.events.clear()
            watch.products = 0
            log.trace.reads.clear()
            whole = None
            if more and isinstance(stepper.passes, WholeModel):
                whole = MicroBatches(stepper.passes, log)
            if training:
                stepper(0, partial(rows_like, run))
            else:
                stepper.evaluate([partial(rows_like, run)])
            if whole is not None:
                whole.repeat(more)
            log.trace.complete = True
            if played.repeats is not None:
                played.repeats.add_to_known()
            if also is not None and training and played.repeats is not None:
                assert isinstance(stepper.passes, Pipeline)
                executor = stepper.passes.executor
                again = trace_again(
                    also, played.trace, played.repeats, stepper, executor, log, watch
                )
                played.fewer = Played(*again) if again else None
        except UserError:
            raise
        except Exception as error:  # whatever the code of a step raises is a finding
            kind, text = _said(error)
            log.trace.troubles.append(Trouble(kind, text, log.places.of_error(error)))
    return played


def _mark_update(stepper: Stepper, log: Log) -> None:
    """Makes the log note what updates parameters, and where all passes have ended."""
    passes, updates = stepper.passes, stepper.updates
    real_train, real_update = passes.train, updates._update

    def train(*args: Any, **kwargs: Any) -> Any:
        found = real_train(*args, **kwargs)
        log.trace.update = len(log.trace.events)
        return found

    def update(*args: Any) -> None:
        log.updating = True
        real_update(*args)
        log.updating = False

    setattr(passes, "train", train)  # noqa: B010
    setattr(updates, "_update", update)  # noqa: B010


@contextmanager
def on_devices(
    run: RunConfig, rank: int, kernels: bool = False, backend: Backend = "nccl"
) -> Iterator[Log]:
    """Makes this process a rank of the run's group of devices, and yields the log of it.

    Args:
        run: The run.
        rank: The global rank that is played.
        kernels: Whether kernels are recorded.
        backend: The backend that is imitated.
    """
    places = Places()
    if backend == "nccl":
        fake_gpu()  # registers the device type that `recording` names
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
    return ("untraced" if _is_of_the_trace(error) else "error"), text


def _is_of_the_trace(error: Exception) -> bool:
    """Returns whether a step on real tensors would not have this error.

    Either torch needs values, which fake tensors do not have, or the code of a trace raises it.
    """
    where = [frame.filename for frame in extract_tb(error.__traceback__)]
    return type(error).__name__ in _NEEDS_VALUES or any(
        name.startswith(_HERE) for name in where[-1:]
    )
