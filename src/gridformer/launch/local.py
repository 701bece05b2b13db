"""How local worker processes start, and how a run ends when one of them fails or is told to stop.

    launch(worker, (plan,), n_processes)        # in the command line's process
        def worker(plan): world = init_world(...); ...; close_world()

One process, or one that torchrun or srun has started: the entrypoint runs right here. Otherwise
torch's elastic agent starts local processes and watches them.

Exit codes: 0 done; 1 a worker failed (its traceback is the last thing printed); 2 a UserError;
130, 143, 129 stopped by SIGINT, SIGTERM, SIGHUP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridformer.errors import ConfigError, UserError
from gridformer.hardware import n_cores
from gridformer.launch import stopping
from gridformer.launch.joining import joined

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# What every worker that trains would import by itself.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.multiprocessing.api",
    "torch._dynamo",  # by every optimizer
    "gridformer.cli.app",  # by __main__
]
# Workers end themselves stopping.GRACE_S after a stop signal; later than this they are killed.
_PATIENCE_S = stopping.GRACE_S + 0.5
# How long a worker whose peer broke the connection stays, so that the peer is found first.
_LINGER_S = 1.0


def launch(entrypoint: Callable[..., None], args: tuple[Any, ...], n_processes: int) -> None:
    """Run `entrypoint(*args)` on every process of the run; returns when all are done.

    Args:
        entrypoint: a function at the top level of a module.
        args: picklable.
        n_processes: of the whole run. See `check_devices` for what to check first.

    Raises:
        UserError: raised by a worker.
        SystemExit: a worker failed (1; its traceback has been printed) or the run was stopped by a
            signal (128 + its number; one line has been printed).
    """
    if n_processes == 1 or joined():
        _run_here(entrypoint, args)
    else:
        _run_workers(entrypoint, args, n_processes)


def warm_up(*modules: str) -> None:
    """Start loading torch and `modules` for workers to come, in the background.

    Worker processes are forked from a server that has them loaded, which saves seconds. Calling
    this is optional; the earlier, the more of the loading happens beside the caller's own.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *modules])
    from multiprocessing.forkserver import ensure_running

    ensure_running()


def _run_here(entrypoint: Callable[..., None], args: tuple[Any, ...]) -> None:
    stop = stopping.install()
    try:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun reads the cause of a failure there
            from torch.distributed.elastic.multiprocessing.errors import record

            entrypoint = record(entrypoint)
        entrypoint(*args)
    finally:
        stop.uninstall()
    if stop.requested:
        if os.environ.get("RANK", "0") == "0":
            _print_stopped(stop.signal_name)
        raise SystemExit(stop.exit_code)


# --------------------------------------------------------------------------- the launcher


def _run_workers(entrypoint: Callable[..., None], args: tuple[Any, ...], n_processes: int) -> None:
    warm_up(entrypoint.__module__)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    signals = [s.name for s in stopping.SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
    with tempfile.TemporaryDirectory(prefix="gridformer-") as folder, _quiet(), _signals_restored():
        settings: dict[str, Any] = {
            "min_nodes": 1,
            "max_nodes": 1,
            "nproc_per_node": n_processes,
            "run_id": f"gridformer-{os.getpid()}",
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "localhost:0",  # any free port
            "local_addr": "localhost",
            "max_restarts": 0,
            "start_method": "forkserver",
            "logs_specs": DefaultLogsSpecs(log_dir=folder),
            "signals_to_handle": ",".join(signals),
            "shutdown_timeout": round(_PATIENCE_S),
        }
        known = {field.name for field in dataclasses.fields(LaunchConfig)}  # grows by release
        config = LaunchConfig(**{k: v for k, v in settings.items() if k in known})
        try:
            elastic_launch(config, _worker)(entrypoint, args, _threads(n_processes))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            _report(rank, failure)
        except (SignalException, KeyboardInterrupt) as stopped:
            _end_workers()
            signum = getattr(stopped, "sigval", signal.SIGINT)
            _print_stopped(signal.Signals(signum).name)
            raise SystemExit(128 + signum) from None
        finally:
            _end_workers()


def _report(rank: int, failure: ProcessFailure) -> None:
    """Tell why a worker failed, and leave with the right exit code."""
    data = failure.error_file_data.get("message")
    if isinstance(data, dict) and "user_error" in data:
        if data.get("problems"):
            raise ConfigError(data["problems"])
        raise UserError(data["user_error"])
    if isinstance(data, dict):
        _print(f"rank {rank} failed:\n\n{data['extraInfo']['py_callstack'].rstrip()}")
        raise SystemExit(1)
    who = f"rank {rank} (pid {failure.pid})"
    if failure.exitcode - 128 in stopping.SIGNALS:
        name = signal.Signals(failure.exitcode - 128).name
        _print_stopped(f"{name} sent to rank {rank}")
        raise SystemExit(failure.exitcode)
    if failure.exitcode >= 0:
        _print(f"{who} exited with code {failure.exitcode} and no error message")
        raise SystemExit(1)
    cause = "a crash in native code: see what it printed above"
    if -failure.exitcode == signal.SIGKILL:
        cause = (
            "out of memory is the usual cause: try a smaller batch, more micro_batches, or a "
            "layout that splits the model further"
        )
    name = failure.signal_name()
    _print(f"{who} was killed by signal {-failure.exitcode} ({name}): {cause}")
    raise SystemExit(1)


def _end_workers() -> None:
    """Leave no worker behind: also after a second signal, or one that came while they started."""
    children = multiprocessing.active_children()
    if not children:
        return
    for signum in stopping.SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # the wait is short enough
    for child in children:
        child.terminate()
    deadline = time.monotonic() + _PATIENCE_S
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join(1.0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the agent's own log lines, unless the user asked for them: ours say the same."""
    if "LOGLEVEL" in os.environ or "TORCH_LOGS" in os.environ:
        yield
        return
    prefixes = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
    names = [name for name in logging.root.manager.loggerDict if name.startswith(prefixes)]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    names = [*stopping.SIGNALS, signal.SIGQUIT]
    before = {signum: signal.getsignal(signum) for signum in names}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def _print_stopped(by: str) -> None:
    _print(f"gridformer: stopped by {by.replace('SIGINT', 'Ctrl-C (SIGINT)', 1)}")


def _print(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


def _threads(n_processes: int) -> int | None:
    """Threads a worker; None when the user has chosen with OMP_NUM_THREADS."""
    if os.environ.get("OMP_NUM_THREADS"):
        return None
    return max(1, n_cores() // n_processes)


# --------------------------------------------------------------------------- a worker


def _worker(entrypoint: Callable[..., None], args: tuple[Any, ...], threads: int | None) -> None:
    """What a started process runs: the entrypoint; a failure is written down for the launcher."""
    stop = stopping.install()
    stop.is_hopeless = _a_peer_has_failed
    threading.Thread(target=_die_with_launcher, name="launcher watch", daemon=True).start()
    if sys.platform == "linux":
        # All peers are on this machine; its own host name often does not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if threads is not None:
        import torch

        os.environ["OMP_NUM_THREADS"] = str(threads)  # for processes started from here
        torch.set_num_threads(threads)  # OpenMP itself has read the variable long ago
    try:
        entrypoint(*args)
    except Exception as error:
        stop.nothing_left_to_save()
        caused_by_peer = _is_effect_of_a_peer(error)
        if not stop.requested:
            _write_failure(error)
            if caused_by_peer:
                time.sleep(_LINGER_S)
            raise SystemExit(2 if isinstance(error, UserError) else 1) from None
        if caused_by_peer:
            stop.tell_nothing_was_saved("another rank did not end its step")
        else:  # for instance a checkpoint that could not be written
            traceback.print_exc()
    stop.nothing_left_to_save()
    if stop.requested:
        raise SystemExit(stop.exit_code)


def _die_with_launcher() -> None:
    """End this process when the launcher is gone, even killed, whatever the main thread does."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _write_failure(error: Exception) -> None:
    """Fill the file in which torch's elastic agent looks for a worker's error."""
    first = error.__traceback__.tb_next if error.__traceback__ else None  # without our own frame
    text = "".join(traceback.format_exception(type(error), error, first))
    message: dict[str, Any] = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
    }
    if isinstance(error, UserError):
        message["user_error"] = str(error)
        message["problems"] = getattr(error, "problems", [])
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def _a_peer_has_failed() -> bool:
    """Whether any worker on this machine has written its error file, FOLDER/RANK/error.json."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return bool(path) and any(Path(path).parents[1].glob("*/error.json"))


def _is_effect_of_a_peer(error: Exception) -> bool:
    """Whether a collective failed because another rank is gone: that one's failure is the cause."""
    import torch.distributed as dist

    signs = ("closed by peer", "reset by peer", "Broken pipe", "Socket closed", "gloo/transport")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )
