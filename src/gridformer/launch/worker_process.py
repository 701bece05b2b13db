"""What a worker process does around the entrypoint: handles signals, reports a failure, and ends.

A rank that fails first reports, then abandons its process groups, then ends: nothing that may block
comes before the report, and peers, which fail when the connection closes, fail after it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from gridformer.launch.failures import cause_of, out_of_memory, print_last, print_stopped
from gridformer.mesh.launch_env import STORE_FILE, RankEnv
from gridformer.mesh.process_group import abandon_process_groups, is_effect_of_a_peer
from gridformer.utils import signals
from gridformer.utils.errors import SaveError, UserError
from gridformer.utils.process import end_with_parent, never_fail_to_print, use_expandable_segments

# Under torchrun, a rank whose peer broke the connection waits this long before it ends, because
# torchrun polls its workers ten times a second, blames the first that ended, and compares whole
# seconds.
_LINGER_S = 1.1
_REPORT = "TORCHELASTIC_ERROR_FILE"  # where torchrun, and `launch` as well, reads why a rank failed
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}
at_failure: list[Callable[[], None]] = []  # tell the other ranks that this one has failed


class Meeting:
    """The private folder of a local run, for the rendezvous and failure reports of its ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed = folder / "failed"  # which the launcher creates once it knows
        self.stopped = folder / "stopped"  # what stopped the run, by workers that have saved

    def saving(self, rank: int | str) -> Path:
        """Returns the file that exists as long as a rank saves and must not be killed."""
        return self.folder / f"saving-{rank}"

    def error_file(self, rank: int | str) -> Path:
        """Returns the file in which a rank reports its failure."""
        return self.folder / f"error-{rank}.json"

    def is_saving(self) -> bool:
        """Returns whether any rank saves."""
        return any(self.folder.glob(self.saving("*").name))

    def is_hopeless(self) -> bool:
        """Returns whether a worker has failed, so that no checkpoint can be saved anymore."""
        return self.failed.exists() or any(self.folder.glob(self.error_file("*").name))


def work(
    entrypoint: Callable[..., None],
    args: tuple[Any, ...],
    rank: int,
    size: int,
    meeting: Meeting,
    threads: int | None,
    policy: signals.StopPolicy,
) -> None:
    """The main function of a process that `launch` started, which ends here if it fails.

    `threads` is the number of threads for torch's CPU operations; None does not change it.
    """
    never_fail_to_print()  # a stream may be closed, which a process of its own does not inherit
    stop = signals.install(replace(policy, again_after_s=float("inf")))  # that is the launcher's
    stop.is_hopeless = meeting.is_hopeless
    stop.on_hold = partial(_mark, meeting.saving(rank))
    stop.report = _write_failure
    end_with_parent()
    faulthandler.enable(all_threads=True)  # a crash in native code prints where it happened
    use_expandable_segments()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        STORE_FILE: str(meeting.folder / "store"),
        _REPORT: str(meeting.error_file(rank)),
    }
    if sys.platform in _LOOPBACK:
        # All peers are on this machine, so no other machine needs to reach the sockets through
        # which they send tensors. Also, the machine's own host name often does not resolve.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, _LOOPBACK[sys.platform])
    if threads is not None:
        import torch

        os.environ["OMP_NUM_THREADS"] = str(threads)  # for child processes of this one
        torch.set_num_threads(threads)  # OpenMP in this process has already read the variable
    try:
        entrypoint(*args)
    except Exception as error:
        _fail(error, stop)
    stop.nothing_left_to_save()
    if stop.requested:
        if stop.exit_code == signals.REQUEUE:
            write_whole(meeting.stopped, stop.cause)  # each rank does, and may be killed meanwhile
        raise SystemExit(stop.exit_code)


def _mark(path: Path, exists: bool) -> None:
    """Creates or removes a file that says something by its existence."""
    with suppress(OSError):  # TMPDIR may be full
        if exists:
            path.touch()
        else:
            path.unlink(missing_ok=True)


def work_here(
    entrypoint: Callable[..., None],
    args: tuple[Any, ...],
    place: RankEnv | None,
    policy: signals.StopPolicy | None = None,
) -> None:
    """Runs the entrypoint in this process: the whole run, or a rank that torchrun or srun started.

    A failure inside a process group is reported and ends this process, for whose end peers wait.

    Raises:
        Exception: The entrypoint raised it outside a process group.
        SystemExit: A signal asked to stop.
    """
    again_after_s = signals.TWICE_BY_TORCHRUN_S if place and place.by == "torchrun" else 0.0
    policy = policy or signals.StopPolicy()
    stop = signals.install(replace(policy, again_after_s=again_after_s))
    use_expandable_segments()
    if report := os.environ.get(_REPORT):
        faulthandler.enable(all_threads=True)
        stop.is_hopeless = lambda: any(Path(report).parents[1].glob("*/error.json"))
        stop.report = _write_failure
    try:
        entrypoint(*args)
    except Exception as error:
        import torch.distributed as dist

        if place and dist.is_initialized():
            _fail(error, stop)
        _write_failure(error)
        raise
    finally:
        stop.uninstall()
    if stop.exit_code:
        if os.environ.get("RANK", "0") == "0":
            print_stopped(stop.cause, stop.exit_code)
        raise SystemExit(stop.exit_code)


def end_from_watch(reason: str, text: str, **report: Any) -> NoReturn:
    """Ends this process, whose main thread waits for a message.

    It prints `text`, and reports it with a reason of one line, and more, to the launcher.
    """
    _write(reason, text, **report)
    if STORE_FILE not in os.environ:  # else `launch` prints it
        print_last(text)
    abandon_process_groups()
    signals.end_process(1)


def _fail(error: Exception, stop: signals.StopRequest) -> NoReturn:
    """Reports a failure, abandons the process groups, and ends this process, in this order."""
    stop.nothing_left_to_save()
    caused_by_peer = _is_effect_of_a_peer(error)
    prints = STORE_FILE not in os.environ  # otherwise `launch` prints it
    if stop.requested:
        if isinstance(error, UserError):
            if not stop.is_hopeless():  # else a peer reports it: all read the same run file
                print(f"error: {error}", file=sys.stderr)
        elif not caused_by_peer:  # for example, a checkpoint could not be written
            traceback.print_exception(error)
        elif not stop.is_hopeless():  # else a failed peer reports why the run ends
            stop.tell_nothing_was_saved("another rank did not end its step")
        code = stop.exit_code
    else:
        if caused_by_peer and prints:
            time.sleep(_LINGER_S)
        if not stop.reported:
            with suppress(OSError, ValueError, AttributeError):  # if there are too many descriptors
                os.close(sys.stdin.fileno())  # not 0, which may be the pipe that ends with `launch`
            try:
                _write_failure(error)
            except OSError:  # TMPDIR is full
                prints = True
        if prints:
            _print_failure(error)
        code = error.exit_code if isinstance(error, UserError) else 1
        for tell in at_failure if not caused_by_peer else ():
            tell()
    abandon_process_groups()
    # Not sys.exit: at interpreter shutdown the destructors of groups wait for pending messages.
    signals.end_process(code)


def _write_failure(error: Exception) -> None:
    """Writes why this rank failed for its launcher, without the frame of this module."""
    first = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, first))
    message: dict[str, Any] = {
        "caused_by_peer": _is_effect_of_a_peer(error),
        "meaning": cause_of(error),
        "out_of_memory": out_of_memory(error) is not None,
    }
    if isinstance(error, UserError):
        message["user_error"] = str(error)
        message["exit_code"] = error.exit_code
        message["problems"] = getattr(error, "problems", [])
    if isinstance(error, SaveError):  # a sentence that needs no traceback
        message["report"] = f"gridformer: {error}"
    elif isinstance(error, OSError) and message["meaning"]:  # so does this
        message["report"] = f"rank {os.environ.get('RANK', '?')} failed: {message['meaning']}"
    _write(f"{type(error).__name__}: {error}", text, **message)


def _write(text: str, callstack: str, **more: Any) -> None:
    """Writes a report as torchrun and `launch` read it, if either started this process."""
    if path := os.environ.get(_REPORT):
        now = time.time()
        extra = {"py_callstack": callstack, "timestamp": str(int(now))}
        message = {"message": text, "extraInfo": extra, "time": now, **more}
        write_whole(Path(path), json.dumps({"message": message}))


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is complete as soon as it exists."""
    unfinished = path.with_suffix(f".unfinished-{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _print_failure(error: Exception) -> None:
    """Prints why this rank ends. Only the rank where something failed shows a traceback."""
    sys.stdout.flush()
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "?"
    if isinstance(error, UserError | SaveError):
        print(f"error: {error}", file=sys.stderr)
    elif _is_effect_of_a_peer(error):
        first = str(error).strip().split("\n", 1)[0]
        print(
            f"rank {rank} ends because its connection to another rank broke, which failed or was "
            f"killed: {first}",
            file=sys.stderr,
        )
    else:
        if meaning := cause_of(error):
            print(f"rank {rank} failed: {meaning}\n", file=sys.stderr)
        if not meaning or not isinstance(error, OSError):
            traceback.print_exception(error)


def _is_effect_of_a_peer(error: Exception) -> bool:
    """Returns whether this rank failed only because of another one, which says or is the cause."""
    if isinstance(error, SaveError):
        return error.elsewhere
    return is_effect_of_a_peer(error)
