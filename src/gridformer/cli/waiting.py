"""Progress messages of a command while it searches for something that may take a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def waiting() -> Iterator[Callable[[str, str], None]]:
    """Yields a function `tell(found, doing)` that reports progress on standard error.

    A text `found` is printed for good unless it is empty. The text `doing` names the current
    activity: on a terminal it is a line with a spinner that disappears when the block ends,
    elsewhere it is printed.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    status = console.status("")

    def tell(found: str, doing: str) -> None:
        if found:
            console.print(Text(found), soft_wrap=True)
        if console.is_terminal:
            status.update(Text(doing))
            status.start()
        else:
            console.print(Text(doing))

    try:
        yield tell
    finally:
        status.stop()
