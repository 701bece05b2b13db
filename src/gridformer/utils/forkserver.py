"""The server from which worker processes are forked, with their imports preloaded."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import util
from typing import Any

from gridformer.utils import signals
from gridformer.utils.errors import UserError
from gridformer.utils.folders import private_prefix
from gridformer.utils.process import let_threads_sleep

# The path of a socket has 103 characters on macOS, and four more on Linux.
_LONGEST_FOLDER = 103 - len("/12345678/listener-12345678")
_at_end: list[Callable[[], None]] = []  # set once a server was started

# Modules that every worker that trains would otherwise import by itself.
PRELOAD = [
    "torch",
    "torch.distributed",
    "safetensors",
    "gridformer.cli.app",  # imported by __main__
]


def warm_up(*modules: str) -> None:
    """Starts to load torch and `modules` for future workers in the background.

    Worker processes are forked from a server that has loaded them, which saves seconds. Calling
    this is optional. An early call lets more of the loading overlap with the caller's own imports.

    Args:
        modules: Names of modules to load besides `PRELOAD`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *modules, "gridformer.utils.interruptible"])
    from multiprocessing.forkserver import ensure_running

    _name_temporary_folder()
    let_threads_sleep()  # the server, which loads torch, inherits the setting
    if not _at_end:
        _at_end.append(partial(_end_server, os.getpid()))
        atexit.register(_at_end[0])
        signals.at_end.append(_at_end[0])
    if threading.current_thread() is not threading.main_thread():
        ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server inherits that, too
    try:
        ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def _end_server(owner: int) -> None:
    """Ends the server with the process that has started it.

    By itself it would end only once it has loaded everything.
    """
    from multiprocessing.forkserver import _forkserver

    pid = getattr(_forkserver, "_forkserver_pid", None)
    if pid is not None and os.getpid() == owner:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _name_temporary_folder() -> None:
    """Gives the folder with the server's socket a name that says whose it is.

    multiprocessing would name it `pymp-...`, and if this process is killed nobody could tell that
    it may be removed; `gridformer.utils.folders.remove_private_leftovers` then removes it.
    """
    # multiprocessing offers no name for this setting, which `util.get_temp_dir` reads.
    settings: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    if settings.get("tempdir") is not None:
        return
    where, prefix = tempfile.gettempdir(), private_prefix()
    if len(os.fsencode(where)) + len(prefix) > _LONGEST_FOLDER:
        prefix = "pymp-"
    if (too_long := len(os.fsencode(where)) + len(prefix) - _LONGEST_FOLDER) > 0:
        raise UserError(
            f"TMPDIR={where} is too long for the path of a socket: name a folder whose path has at "
            f"least {too_long} characters less"
        )
    folder = settings["tempdir"] = tempfile.mkdtemp(prefix=prefix)
    # Late, as multiprocessing removes its own.
    util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-100)
