"""The server from which worker processes are forked, with their imports preloaded."""

from __future__ import annotations

import multiprocessing

from gridformer.utils.threads import let_threads_sleep

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
    context.set_forkserver_preload([*PRELOAD, *modules])
    from multiprocessing.forkserver import ensure_running

    let_threads_sleep()  # the server, which loads torch, inherits the setting
    ensure_running()
