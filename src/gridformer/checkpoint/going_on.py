"""How ranks wait for the first one while it copies a checkpoint, however long that takes.

A draft is marked meanwhile, and the first rank renews the mark every few seconds. The others wait
as long as they see it renewed. They check whether the mark has changed and count seconds with their
own clock, because the clocks of machines and of storage differ.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from gridformer.checkpoint.place import Draft
from gridformer.comm import progress

_SHORTEST_S, _LONGEST_S = 0.002, 0.25  # between two looks
_RENEW_S = 5.0


@contextlib.contextmanager
def going_on(draft: Draft, patience_s: float) -> Iterator[None]:
    """Marks a draft as going on while the block runs.

    Args:
        draft: The draft.
        patience_s: How long other ranks wait for the next sign.

    Raises:
        OSError: The draft cannot be marked; the block does not run.
    """
    waits, ended = threading.current_thread() is threading.main_thread(), threading.Event()

    def renew() -> None:
        while not ended.wait(min(_RENEW_S, patience_s / 4)):
            with contextlib.suppress(OSError):
                draft.going_on(True)
            if waits:
                progress.waits_on_purpose()

    draft.going_on(True)
    thread = threading.Thread(target=renew, name="going on", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # else it could mark the draft again
        with contextlib.suppress(OSError):
            draft.going_on(False)


class CopyPatience:
    """How long a rank waits for the first one.

    Args:
        draft: What the first rank may mark as going on.
        patience_s: How long to wait after each sign.
        first_s: How long to wait if there is none.
    """

    def __init__(self, draft: Draft, patience_s: float, first_s: float) -> None:
        self._draft, self._patience_s = draft, patience_s
        self._sign: int | None = None
        self._ends = time.monotonic() + first_s

    def is_over(self) -> bool:
        """Looks for a sign, and returns whether there was none for too long."""
        now, sign = time.monotonic(), None
        with contextlib.suppress(OSError):
            sign = self._draft.sign()
        if sign is not None and sign != self._sign:
            self._sign, self._ends = sign, max(self._ends, now + self._patience_s)
        return now > self._ends


def until(holds: Callable[[], bool], at_most_s: float = float("inf")) -> None:
    """Waits until a condition holds, which is checked less and less often."""
    pause, ends = _SHORTEST_S, time.monotonic() + at_most_s
    while not holds() and time.monotonic() < ends:
        if threading.current_thread() is threading.main_thread():
            progress.waits_on_purpose()
        time.sleep(pause)
        pause = min(_LONGEST_S, 1.5 * pause)
