"""Settings of this process: its streams, threads and allocator, and what it need not tidy up."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from gridformer.utils.fork_pool import is_copy

# Since torch 2.9 the first name holds for all kinds of GPUs, and the others are still read.
ALLOC_CONF = "PYTORCH_ALLOC_CONF"
_ALLOC_CONFS = (ALLOC_CONF, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_is_command = _is_last_work = False


def use_expandable_segments() -> None:
    """Makes the CUDA allocator grow its segments, unless the user has set it up differently.

    Otherwise memory between tensors of other sizes stays unused: full and partial operands of a
    grid, chunks of logits and buckets of gradients all differ. Torch reads the variable when it
    initializes CUDA, in this process and in those it starts. Only Linux has the setting.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in _ALLOC_CONFS):
        os.environ[ALLOC_CONF] = "expandable_segments:True"


def let_threads_sleep() -> None:
    """Makes OpenMP threads sleep while they wait, in processes that load torch after this call.

    By default they spin, and occupy cores that other processes need: with the demo's model, 2
    threads on 2 cores and 15 to 45 competing processes a step took 7.6 s with spinning and 1.3 s
    with sleeping threads; on an idle machine 0.133 s and 0.152 s. Settings of the user are kept.
    """
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def never_fail_to_print() -> None:
    """Prints `?` for what the terminal's encoding lacks, and nothing to streams that are closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def leave_progress_bar(stream: TextIO | None = None) -> None:
    """Clears the terminal's line and shows its cursor, which a killed progress bar has hidden."""
    stream = stream or sys.stdout
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        print("\r\x1b[2K\x1b[?25h", end="", flush=True, file=stream)


def end_with_parent() -> None:
    """Ends this process of multiprocessing once its parent has ended, even if that was killed.

    A thread waits for that, so it works whatever the main thread does.
    """
    threading.Thread(target=_wait_for_parent, name="parent watch", daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def no_garbage_collection(ends: bool = False) -> Iterator[None]:
    """Turns off the cyclic garbage collector, which searches millions of objects of torch.

    If the process `ends` after the context, the objects of its end are not searched later, either.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ends:
            gc.freeze()
        if was_enabled:
            gc.enable()


def begin_command() -> None:
    """Notes that this process does nothing but run a command."""
    global _is_command
    _is_command = True


@contextmanager
def last_work() -> Iterator[None]:
    """Surrounds the work of a command that starts no training, after which its process ends."""
    global _is_last_work
    with no_garbage_collection(ends=True):
        _is_last_work = _is_command
        try:
            yield
        finally:
            _is_last_work = False


def ends_with_its_work() -> bool:
    """Whether this process ends after its present work, so nobody needs its modules as they are."""
    return _is_last_work or is_copy()
