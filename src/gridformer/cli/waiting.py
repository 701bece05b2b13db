"""What a command says while it looks for something that may take a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def waiting() -> Iterator[Callable[[str, str], None]]:
    """Yields what to call with a finding, which stays on the terminal, and with what goes on.

    On a terminal the latter is one line with a spinner, which goes when the block ends.
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
