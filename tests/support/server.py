"""The server from which a test session forks processes, with what most of them import.

A session has one, which keeps the list of modules with which its first process was started. With a
shorter list, each of the many processes of a session would import torch and this package by itself,
which takes seconds.
"""

import os
from multiprocessing import forkserver, get_context

PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "tests.support.preload"]


def prepare_server() -> None:
    """Name the modules; call it before the session starts its first process.

    One of several workers of a session will need the server, so it begins to load at once.
    """
    get_context("forkserver").set_forkserver_preload(PRELOAD)
    if "PYTEST_XDIST_WORKER" in os.environ:
        forkserver.ensure_running()
