"""How all ranks stop at the same point, because of a signal or because the run's time is over.

There is a stop point before each micro-batch, and before each batch of an evaluation. Before the
last micro-batch of a step nothing has been updated, so the step can be dropped there and the state
of the last complete step can be saved. All ranks must stop at the same point, because the work
between two points contains messages. They agree without any message on the devices:

1. A rank that is told to stop says so in the store in which the run met, which a thread of every
   rank polls.
2. This thread pauses its rank at the next stop point. It writes to the store how many points the
   rank has passed, how many there will be at the end of the step or evaluation, and how long that
   is expected to take.
3. Rank 0 reads the positions of all ranks and decides: to go on to that end, if it is expected in
   time, or only as far as any rank has come. It writes that point's number, and there all stop.

No two ranks can wait for each other, because these threads do nothing else. If a rank does
not answer (it may be dead), the others go on after a while, and say so, so that there is no
agreement. Then the flag that every step adds up over all ranks ends the run after a step.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from gridformer.utils.signals import MAX_HOURS, StopRequest

if TYPE_CHECKING:
    import torch.distributed as dist

# In the store.
_TOLD, _POSITION, _AGREED = "stop/told", "stop/position", "stop/agreed"
_NO_AGREEMENT = -1
_POLL_S = 0.5  # between two polls of the store; more if many ranks poll
_POLLS_PER_S = 500.0  # of all ranks together
_WAIT_S = 10.0  # how long a rank waits at a stop point for the others' positions
_PAUSE_S = 0.02
# Work may take up to this factor times its expected time.
_STEP_MARGIN, _SAVE_MARGIN, _MARGIN_S = 1.25, 1.5, 1.0


class StepDropped(Exception):  # noqa: N818 - it is no error
    """All ranks stop inside a step or an evaluation. Nothing was updated since it began."""


class StopProtocol:
    """Decides where a run stops that is told to. One is made for each run, on every rank.

    Args:
        stop: The stop request of this process.
        rank: This rank.
        size: The number of ranks.
        store: The store in which the run met; None if there is none. Several ranks then stop only
            after a step.
        ends_at: The time (`time.time`) at which the run must have saved and ended; None without
            such a time. Only rank 0 looks at it.
        save_s: How many seconds a save may take, until one was measured.
    """

    def __init__(
        self,
        stop: StopRequest,
        rank: int,
        size: int,
        store: dist.Store | None,
        ends_at: float | None = None,
        save_s: float = 0.0,
    ) -> None:
        self.stop, self.rank, self.size, self.store = stop, rank, size, store
        self.ends_at, self.save_s = ends_at, save_s
        self._lock = threading.Condition()
        self._passed = 0  # stop points that this rank has passed since the run began
        self._pause_at: int | None = None  # this rank passes no further point before an agreement
        self._stop_at: int | None = None  # where all ranks stop
        self._expected_s: dict[str, float] = {}  # of a step, and of an evaluation
        self._kind, self._began, self._last, self._first = "", 0.0, 0, 0
        self._n_steps = 0
        self._closed = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        if size > 1 and store is not None:
            stop.tell(self._wake.set)
            self._thread = threading.Thread(target=self._agree, name="stop", daemon=True)
            self._thread.start()

    # ------------------------------------------------------------------ the main thread

    def begins(self, kind: str, n_points: int) -> bool:
        """Notes that a step or an evaluation begins, and passes the stop point before it.

        Args:
            kind: `step` or `evaluation`, each of which takes about the same time again.
            n_points: How many stop points it has, this first one included.

        Returns:
            Whether the run stops here.
        """
        with self._lock:
            self._kind, self._began = kind, time.monotonic()
            self._first, self._last = self._passed, self._passed + n_points
        return self.stops_before(0)

    def ended(self) -> None:
        """Notes that the step or evaluation has ended, and how long it took."""
        with self._lock:
            self._expected_s[self._kind] = time.monotonic() - self._began
            self._n_steps += self._kind == "step"
            self._passed = self._last  # passes without a stop point in every micro-batch

    def stops_before(self, number: int) -> bool:
        """Passes a stop point, unless all ranks stop there.

        Args:
            number: The point's number since `begins`.

        Returns:
            Whether all ranks stop there. The caller must then begin nothing that comes after it.
        """
        if self.rank == 0:
            self._look_at_the_clock()
        if self.size == 1 and self.stop.requested and self._stop_at is None:
            self._stop_at = self._decided([self._position()])
        with self._lock:
            point = self._first + number
            if self._pause_at is not None and point >= self._pause_at and self._stop_at is None:
                self._wait()
            if self._stop_at is not None and 0 <= self._stop_at <= point:
                return True
            self._passed = max(self._passed, point + 1)
            return False

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(1.0)  # the store may be gone

    def adopt_cause(self) -> None:
        """Called after a run was stopped early: notes the cause, if only other ranks know it."""
        if not self.stop.requested and self.store is not None:
            told = _wait_for(self.store, _TOLD, _WAIT_S)
            self.stop.ask(told or "SIGTERM")

    def _wait(self) -> None:
        """Waits until it is known where all ranks stop; the lock is held."""
        seconds = min(_WAIT_S, self.stop.grace_s / 3)
        if not self._lock.wait_for(lambda: self._stop_at is not None, seconds):
            assert self.store is not None
            self._stop_at = int(self.store.compare_set(_AGREED, "", str(_NO_AGREEMENT)))

    def _look_at_the_clock(self) -> None:
        """Asks the run to stop if the work that begins or is in flight may not end in time.

        At least one step is done, so that a run which is started again and again makes progress.
        """
        if self.ends_at is None or self.stop.requested or self._n_steps == 0:
            return
        # An evaluation that was never measured is taken to be as long as a step.
        need = self._rest_s() if self._kind in self._expected_s else self._expected_s["step"]
        if self._passed == self._first and self.size > 1:
            need += self._expected_s["step"]  # the others may have begun already
        if time.time() + _STEP_MARGIN * need + self._save_s() > self.ends_at:
            self.stop.ask(MAX_HOURS)

    # ------------------------------------------------------------------ what is expected

    def _position(self) -> tuple[int, float, int]:
        """Returns how many points this rank has passed, and the rest of what it has begun.

        The rest is the seconds until its step or evaluation ends, and how many points it will have
        passed then.
        """
        rest = self._rest_s() if self._first < self._passed < self._last else 0.0
        return self._passed, rest, self._last if self._passed > self._first else self._passed

    def _decided(self, positions: list[tuple[int, float, int]]) -> int:
        """Returns the point at which to stop, given the positions of all ranks."""
        left = min(self.stop.seconds_left, self.stop.grace_s)
        if self.stop.cause == MAX_HOURS and self.ends_at is not None:
            left = self.ends_at - time.time()
        passed, rest, last = max(positions)
        return last if _STEP_MARGIN * rest + self._save_s() <= left else passed

    def _rest_s(self) -> float:
        """Returns how many more seconds the step or evaluation is expected to take."""
        if self._kind not in self._expected_s:
            return float("inf")
        return max(0.0, self._expected_s[self._kind] - (time.monotonic() - self._began))

    def _save_s(self) -> float:
        return _SAVE_MARGIN * self.save_s + _MARGIN_S

    # ------------------------------------------------------------------ the thread

    def _agree(self) -> None:
        with suppress(RuntimeError):  # torch's error for a store that is gone, as peers have ended
            self._take_part()
        with self._lock:
            if self._stop_at is None and not self._closed:
                self._stop_at = _NO_AGREEMENT
            self._lock.notify_all()

    def _take_part(self) -> None:
        assert self.store is not None
        pause = max(_POLL_S, self.size / _POLLS_PER_S)
        while not self.stop.requested and not self.store.check([_TOLD]):
            self._wake.wait(pause)
            if self._closed:
                return
        if self.stop.requested:
            self.store.set(_TOLD, self.stop.cause)
        with self._lock:
            self._pause_at = self._passed
            position = self._position()
        self.store.set(f"{_POSITION}/{self.rank}", json.dumps(position))
        if self.rank == 0:
            self._decide()
        while self._stop_at is None and not self._closed:
            if agreed := _wait_for(self.store, _AGREED, _PAUSE_S):
                with self._lock:
                    self._stop_at = int(agreed)

    def _decide(self) -> None:
        """Reads all positions, and writes where to stop, unless a rank no longer waits for it."""
        assert self.store is not None
        positions: list[tuple[int, float, int]] = []
        while len(positions) < self.size:
            if self._closed or self._stop_at is not None:
                return
            text = _wait_for(self.store, f"{_POSITION}/{len(positions)}", _PAUSE_S)
            positions += [tuple(json.loads(text))] if text else []
        self.stop.ask(_wait_for(self.store, _TOLD, _WAIT_S))
        with self._lock:
            point = self._decided(positions)
        self.store.compare_set(_AGREED, "", str(point))


def _wait_for(store: dist.Store, key: str, seconds: float) -> str:
    """Returns a value as soon as it is set, or an empty text after that number of seconds."""
    until = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > until:
            return ""
        time.sleep(_PAUSE_S)
    return store.get(key).decode()
