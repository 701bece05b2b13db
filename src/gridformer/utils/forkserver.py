"""The server from which processes are forked, and what it has loaded for them."""

from __future__ import annotations

import multiprocessing

from gridformer.utils.threads import let_threads_sleep

# What every worker that trains would import by itself.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch._dynamo",  # by every optimizer
    "gridformer.cli.app",  # by __main__
]


def warm_up(*modules: str) -> None:
    """Start loading torch and `modules` for workers to come, in the background.

    Worker processes are forked from a server that has them loaded, which saves seconds. Calling
    this is optional; the earlier, the more of the loading happens beside the caller's own.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *modules])
    from multiprocessing.forkserver import ensure_running

    let_threads_sleep()  # the server inherits it, and loads torch
    ensure_running()
