"""What a worker process does around the entrypoint: it listens, reports a failure, and ends.

A rank that fails reports first, then gives up its groups, then ends. In this order nothing that
may block comes before the report, and the peers, which notice that the connection has closed, can
only fail after it.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from gridformer.mesh.launch_env import STORE_FILE, Joined
from gridformer.mesh.process_group import abandon_world
from gridformer.utils import signals as stopping
from gridformer.utils.errors import UserError

# A rank whose peer broke the connection stays this long under torchrun, which looks at its workers
# ten times a second and takes the first that has ended for the cause. It compares whole seconds.
_LINGER_S = 1.1
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


@dataclass(frozen=True)
class Meeting:
    """The private folder of a local run, in which its processes meet and report failures."""

    folder: Path

    @property
    def store_file(self) -> Path:
        return self.folder / "store"

    @property
    def failed(self) -> Path:
        """Exists from the moment when the launcher knows that the run has failed."""
        return self.folder / "failed"

    def error_file(self, rank: int | str) -> Path:
        return self.folder / f"error-{rank}.json"

    def is_hopeless(self) -> bool:
        """Whether some worker has failed, so that nothing can be saved any more."""
        return self.failed.exists() or any(self.folder.glob(self.error_file("*").name))


def work(
    entrypoint: Callable[..., None],
    args: tuple[Any, ...],
    rank: int,
    size: int,
    meeting: Meeting,
    threads: int | None,
) -> None:
    """What a process that `launch` has started runs.

    Args:
        entrypoint: called with `args`.
        rank: of this process, one of `size`.
        threads: for torch's CPU operations; None leaves them alone.
    """
    stop = stopping.install()
    stop.is_hopeless = meeting.is_hopeless
    threading.Thread(target=_die_with_launcher, name="launcher watch", daemon=True).start()
    faulthandler.enable(all_threads=True)  # a crash in native code says where
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        STORE_FILE: str(meeting.store_file),
    }
    if sys.platform in _LOOPBACK:
        # All peers are on this machine, so nobody outside need reach the sockets through which they
        # send tensors. (And the machine's own name often does not resolve.)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, _LOOPBACK[sys.platform])
    if threads is not None:
        import torch

        os.environ["OMP_NUM_THREADS"] = str(threads)  # for processes started from here
        torch.set_num_threads(threads)  # OpenMP itself has read the variable long ago
    try:
        entrypoint(*args)
    except Exception as error:
        _fail(error, stop, meeting.error_file(rank))
    stop.nothing_left_to_save()
    if stop.requested:
        raise SystemExit(stop.exit_code)


def work_here(entrypoint: Callable[..., None], args: tuple[Any, ...], place: Joined | None) -> None:
    """Run the entrypoint in this process, which is the whole run, or one of those of `place`.

    Raises:
        Exception: what the entrypoint raises, while this process is in no process group. In one,
            the failure is reported and the process ends: leaving the group orderly would wait for
            peers that wait for this rank.
        SystemExit: a signal asked to stop.
    """
    stop = stopping.install()
    error_file = _error_file_of_torchrun()
    if error_file:
        faulthandler.enable(all_threads=True)
        stop.is_hopeless = lambda: any(error_file.parents[1].glob("*/error.json"))
    try:
        entrypoint(*args)
    except Exception as error:
        if place and _in_a_group():
            _fail(error, stop, error_file, by_torchrun_or_srun=True)
        if error_file:
            _write_failure(error, error_file)
        raise
    finally:
        stop.uninstall()
    if stop.requested:
        if os.environ.get("RANK", "0") == "0":
            print_stopped(stop.signal_name)
        raise SystemExit(stop.exit_code)


def _fail(
    error: Exception,
    stop: stopping.StopRequest,
    error_file: Path | None,
    by_torchrun_or_srun: bool = False,
) -> NoReturn:
    """Report a failure, leave the groups, and end this process, in this order."""
    stop.nothing_left_to_save()
    caused_by_peer = _is_effect_of_a_peer(error)
    if stop.requested:
        if not caused_by_peer:  # for instance a checkpoint that could not be written
            traceback.print_exception(error)
        elif not stop.is_hopeless():  # else a peer has failed, and its report says why the run ends
            stop.tell_nothing_was_saved("another rank did not end its step")
        code = stop.exit_code
    else:
        if caused_by_peer and by_torchrun_or_srun:
            time.sleep(_LINGER_S)
        if error_file:
            _write_failure(error, error_file)
        if by_torchrun_or_srun:  # `launch` prints it where it has started the workers
            _print_failure(error)
        code = 2 if isinstance(error, UserError) else 1
    abandon_world()
    # Not through the interpreter's own end: the destructors of groups wait for pending messages.
    stopping.end_process(code)


def _die_with_launcher() -> None:
    """End this process when the launcher is gone, even killed, whatever the main thread does."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _error_file_of_torchrun() -> Path | None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path else None


def _write_failure(error: Exception, path: Path) -> None:
    """Say in a file why this rank failed, in the form that torchrun reads, which `launch` does too.

    The file is complete from the moment when it is there.
    """
    first = error.__traceback__.tb_next if error.__traceback__ else None  # without our own frame
    text = "".join(traceback.format_exception(type(error), error, first))
    message: dict[str, Any] = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
        "time": time.time(),
        "caused_by_peer": _is_effect_of_a_peer(error),
    }
    if isinstance(error, UserError):
        message["user_error"] = str(error)
        message["problems"] = getattr(error, "problems", [])
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"message": message}), encoding="utf-8")
    unfinished.rename(path)


def _print_failure(error: Exception) -> None:
    sys.stdout.flush()
    if isinstance(error, UserError):
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)


def _is_effect_of_a_peer(error: Exception) -> bool:
    """Whether a collective failed because another rank is gone: that one's failure is the cause."""
    import torch.distributed as dist

    signs = ("closed by peer", "reset by peer", "Broken pipe", "Socket closed", "gloo/transport")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )


def _in_a_group() -> bool:
    import torch.distributed as dist

    return bool(dist.is_initialized())


def print_stopped(by: str) -> None:
    """The one line that a run leaves which was told to stop."""
    print_last(f"gridformer: stopped by {by.replace('SIGINT', 'Ctrl-C (SIGINT)', 1)}")


def print_last(text: str) -> None:
    """To the error output, after all that has been printed."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
