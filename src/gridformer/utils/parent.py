"""Ends a process of multiprocessing together with the one that started it."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """Ends this process once its parent has ended, also if that was killed and could not ask.

    A thread waits for that, so it works whatever the main thread does.
    """
    threading.Thread(target=_wait_for_parent, name="parent watch", daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
