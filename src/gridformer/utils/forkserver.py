"""The server from which worker processes are forked, with their imports preloaded."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import tempfile
import threading
from multiprocessing import util
from typing import Any

from gridformer.utils.folders import private_prefix
from gridformer.utils.threads import let_threads_sleep

# Of a path of a socket on macOS; Linux allows four more.
_LONGEST_SOCKET = 103
_NAMES = len("12345678/listener-12345678")

# What every worker that trains would otherwise import by itself.
PRELOAD = [
    "torch",
    "torch.distributed",
    "safetensors",
    "torch._dynamo",  # imported by every optimizer
    "gridformer.cli.app",  # imported by __main__
]


def warm_up(*modules: str) -> None:
    """Starts to load torch and `modules` for future workers in the background.

    Worker processes are forked from a server that has loaded them, which saves seconds. Calling
    this is optional. An early call lets more of the loading overlap with the caller's own imports.

    Args:
        modules: names of modules to load besides `PRELOAD`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *modules, "gridformer.utils.interruptible"])
    from multiprocessing.forkserver import ensure_running

    _name_temporary_folder()
    let_threads_sleep()  # the server, which loads torch, inherits the setting
    if threading.current_thread() is not threading.main_thread():
        ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server inherits that, too
    try:
        ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def _name_temporary_folder() -> None:
    """Gives the folder with the server's socket a name that says whose it is.

    multiprocessing would name it `pymp-...`, and if this process is killed nobody could tell that
    it may be removed; `gridformer.utils.folders.remove_private_leftovers` then removes it.
    """
    # multiprocessing offers no name for this setting, which `util.get_temp_dir` reads.
    settings: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    prefix = private_prefix()
    length = len(tempfile.gettempdir()) + 1 + len(prefix) + _NAMES
    if settings.get("tempdir") is not None or length > _LONGEST_SOCKET:
        return
    folder = settings["tempdir"] = tempfile.mkdtemp(prefix=prefix)
    # Late, as multiprocessing removes its own.
    util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-100)
