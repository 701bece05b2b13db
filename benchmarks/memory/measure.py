"""Measures what a process really holds: the bytes that torch's allocators have given out."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gridformer.config import RunConfig
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data.gradients import clear_gradients
from gridformer.parallel.data.zero import stored
from gridformer.parallel.pipeline import LOADING_RUNS
from gridformer.record.batch import rows_like
from gridformer.train.step import Stepper

# Seconds until gloo's threads have let go of what they sent: after a message, and after a step. The
# profiler does not see what these threads free, so the main thread must be the last to hold it.
_MESSAGE_WAIT_S = 0.001
_STEP_WAIT_S = 0.02
DEVICE = torch.device("cpu")


def measure_rank(run: RunConfig, n_steps: int = 4) -> tuple[int, int]:
    """Measures the peak of this process in a run on CPU, which `estimate_rank` estimates.

    Every process of the run's process group must call it.

    Args:
        run: The checked run.
        n_steps: How many steps to measure.

    Returns:
        This process's rank, and its peak in bytes.
    """
    decisions = decide_run(run)
    axes = build_axes(run.layout, DEVICE.type, decisions.block)
    model = build_parallel(
        run.model, run.layout, axes, run.train.seed, DEVICE, run.train.dtype, decisions.choices
    )
    stepper = Stepper(model, run.train, axes, run.layout)
    stepper.updates.allocate(0)
    peak = measured_peak(stepper, lambda: stepper(0, partial(rows_like, run)), n_steps)
    return axes.world.index, peak


def measured_peak(stepper: Stepper, step: Callable[[], object], n_steps: int = 4) -> int:
    """Measures the peak of an optimizer step in bytes, parameters and optimizer state included.

    Returns the smallest peak of several steps, because the time for which a sent message is still
    held varies by chance. On CPU the profiler records every allocation, which is slow, and every
    message takes a moment longer.

    Args:
        stepper: The stepper, whose optimizer state must already be allocated.
        step: Runs a step, which updates the model. Every rank must run the same number of steps.
        n_steps: How many steps to measure.
    """
    if stepper.device.type == "cuda":
        for _ in range(LOADING_RUNS):  # in these, messages go through the host
            step()
        return min(_on_cuda(step) for _ in range(n_steps))
    held = [stored(parameter) for parameter in stepper.model.parameters()]
    moments = [t for state in stepper.updates.state.values() for t in state.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in (*held, *moments)}
    between = sum(storage.nbytes() for storage in storages.values())
    before, peaks = _bytes_of_all(), list[int]()
    for number in range(n_steps):
        if number == 1:  # buffers that the first step has made, and that stay
            between += _bytes_of_all() - before
        profiled = torch.autograd.profiler.profile(profile_memory=True)
        with _silent(), _last_to_hold(), profiled as profile:
            step()
            clear_gradients(stepper.parameters)
            time.sleep(_STEP_WAIT_S)
        now, peak = between, 0
        for event in profile.kineto_results.events():
            if event.name() == "[memory]":
                now += event.nbytes()
                peak = max(peak, now)
        peaks.append(peak)
    return min(peaks)


def _bytes_of_all() -> int:
    """Returns the bytes of the storages that all tensors of this process have."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    return sum(storage.nbytes() for address, storage in storages.items() if address)


@contextlib.contextmanager
def _last_to_hold() -> Iterator[None]:
    """Makes waits for messages last until gloo's threads have let go of the tensors."""
    wait = dist.Work.wait

    def longer(work: dist.Work, *args: Any) -> bool:
        done = wait(work, *args)
        time.sleep(_MESSAGE_WAIT_S)
        return done

    with patch.object(dist.Work, "wait", longer):
        yield


def _on_cuda(step: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Discards what the profiler prints past Python when it starts and stops."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        for number, copy in enumerate(kept, start=1):
            os.dup2(copy, number)
            os.close(copy)
