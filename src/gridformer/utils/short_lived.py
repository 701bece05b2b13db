"""Processes that end when their work is done, and so need not leave modules as others expect them.

Copies of a process are such processes, and those of commands that only compute something.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gridformer.utils.beside import is_copy
from gridformer.utils.garbage import no_garbage_collection

_is_command = _ends = False


def begin_command() -> None:
    """Notes that this process does nothing but run a command."""
    global _is_command
    _is_command = True


@contextmanager
def last_work() -> Iterator[None]:
    """Surrounds the work of a command that starts no training.

    Garbage is not collected: there is hardly any, but millions of objects of torch.
    """
    global _ends
    with no_garbage_collection(ends=True):
        _ends = _is_command
        try:
            yield
        finally:
            _ends = False


def ends_with_its_work() -> bool:
    """Whether nothing but its present work is done in this process."""
    return _ends or is_copy()
