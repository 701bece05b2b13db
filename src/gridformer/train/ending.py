"""How a run ends before its last step, because of a signal or because its time is over.

A run passes a border before each micro-batch, and before each batch of an evaluation. At a border
before the last micro-batch of a step nothing has been updated, so the step can be dropped there and
the state of the last complete step can be saved. All ranks must drop at the same border, because
what lies between two borders contains messages. They agree without any message on the devices:

1. A rank that is told to stop says so in the store in which the run met, where the others look now
   and then, in a thread of their own.
2. This thread promises for its rank that no border after the last one that it has passed will be
   passed before there is an agreement. It writes to the store how many borders that are, how many
   there will be at the end of the step or evaluation, and how long that is expected to take.
3. Rank 0 reads all promises and decides: to go on to that end, if it is expected in time, or only
   as far as any rank has come. It writes that border's number, and there all ranks stop.

No rank can wait for one that waits for it: promises are made by threads that do nothing else. If a
rank makes none (it may be dead), the others go on after a while, and say so, so that there is no
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
_TOLD, _PROMISE, _AGREED = "stop/told", "stop/promise", "stop/agreed"
_NO_AGREEMENT = "none"
_LOOK_S = 0.5  # between two polls of the store; more if many ranks poll
_LOOKS_PER_S = 500.0  # of all ranks together
_WAIT_S = 10.0  # how long a rank waits at a border for the others' promises
_PAUSE_S = 0.02
# Work may take up to this factor times its expected time.
_STEP_MARGIN, _SAVE_MARGIN, _MARGIN_S = 1.25, 1.5, 1.0


class StepDropped(Exception):  # noqa: N818 - it is no error
    """The run ends at a border inside a step or an evaluation. Nothing was updated since it began.

    All ranks raise it at the same border.
    """


class Ending:
    """Decides where a run ends that is told to stop. One is made for each run, on every rank.

    Args:
        stop: The stop request of this process.
        rank: This rank.
        size: The number of ranks.
        store: The store in which the run met; None if there is none. Several ranks then stop only
            after a step.
        ends_at: The time (`time.time`) at which the run must have saved and ended; None without
            such a time. Only that of rank 0 counts.
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
        self._passed = 0  # borders that this rank has passed since the run began
        self._promise: int | None = None
        self._end: int | None = None  # the border at which all ranks stop; -1 for no agreement
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

    def begins(self, kind: str, n_borders: int) -> bool:
        """Notes that a step or an evaluation begins, and passes the border before it.

        Args:
            kind: What begins; those of one kind take about the same time.
            n_borders: How many borders it has, this first one included.

        Returns:
            Whether the run ends here.
        """
        with self._lock:
            self._kind, self._began = kind, time.monotonic()
            self._first, self._last = self._passed, self._passed + n_borders
        return self.at(0)

    def ended(self) -> None:
        """Notes that what `begins` noted has ended, and how long it took."""
        with self._lock:
            self._expected_s[self._kind] = time.monotonic() - self._began
            self._n_steps += self._kind == "step"
            self._passed = self._last  # passes without a border in every micro-batch

    def at(self, number: int) -> bool:
        """Passes a border, unless all ranks stop there.

        Args:
            number: The border's number since `begins`.

        Returns:
            Whether all ranks stop there. The caller must then begin nothing that comes after this
            border.
        """
        if self.rank == 0:
            self._look_at_the_clock()
        if self.size == 1 and self.stop.requested and self._end is None:
            self._end = self._decided([self._place()])
        with self._lock:
            border = self._first + number
            if self._promise is not None and border >= self._promise and self._end is None:
                self._wait()
            if self._end is not None and 0 <= self._end <= border:
                return True
            self._passed = max(self._passed, border + 1)
            return False

    def drop_at(self, number: int) -> None:
        """Passes a border inside a step or evaluation.

        Raises:
            StepDropped: All ranks stop there.
        """
        if self.at(number):
            raise StepDropped

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(1.0)  # the store may be gone

    def adopt(self) -> None:
        """Called after a run was ended early: notes the reason, if only other ranks know it."""
        if not self.stop.requested and self.store is not None:
            told = _wait_for(self.store, _TOLD, _WAIT_S)
            self.stop.ask(told or "SIGTERM")

    def _wait(self) -> None:
        """Waits until it is known where all ranks stop; the lock is held."""
        seconds = min(_WAIT_S, self.stop.grace_s / 3)
        if self._lock.wait_for(lambda: self._end is not None, seconds):
            return
        assert self.store is not None
        found = self.store.compare_set(_AGREED, "", _NO_AGREEMENT).decode()
        self._end = -1 if found == _NO_AGREEMENT else int(found)

    def _look_at_the_clock(self) -> None:
        """Asks the run to stop if what begins or is under way may not end in time.

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

    def _place(self) -> tuple[int, float, int]:
        """Returns how far this rank has come and will come.

        Returns:
            How many borders it has passed, the seconds until the step or evaluation that it has
            begun ends, and how many borders it will have passed then.
        """
        rest = self._rest_s() if self._first < self._passed < self._last else 0.0
        return self._passed, rest, self._last if self._passed > self._first else self._passed

    def _decided(self, places: list[tuple[int, float, int]]) -> int:
        """Returns the border at which to stop, given the places of all ranks."""
        left = min(self.stop.seconds_left, self.stop.grace_s)
        if self.stop.cause == MAX_HOURS and self.ends_at is not None:
            left = self.ends_at - time.time()
        passed, rest, last = max(places)
        return last if _STEP_MARGIN * rest + self._save_s() <= left else passed

    def _rest_s(self) -> float:
        """Returns how many more seconds the step or evaluation under way is expected to take."""
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
            self._end = -1 if self._end is None and not self._closed else self._end
            self._lock.notify_all()

    def _take_part(self) -> None:
        assert self.store is not None
        pause = max(_LOOK_S, self.size / _LOOKS_PER_S)
        while not self.stop.requested and not self.store.check([_TOLD]):
            self._wake.wait(pause)
            if self._closed:
                return
        if self.stop.requested:
            self.store.set(_TOLD, self.stop.cause)
        with self._lock:
            self._promise = self._passed
            place = self._place()
        self.store.set(f"{_PROMISE}/{self.rank}", json.dumps(place))
        if self.rank == 0:
            self._decide()
        while self._end is None and not self._closed:
            agreed = _wait_for(self.store, _AGREED, _PAUSE_S)
            if agreed:
                with self._lock:
                    self._end = -1 if agreed == _NO_AGREEMENT else int(agreed)

    def _decide(self) -> None:
        """Reads all promises, and writes where to stop, unless a rank no longer waits for it."""
        assert self.store is not None
        places: list[tuple[int, float, int]] = []
        while len(places) < self.size:
            if self._closed or self._end is not None:
                return
            found = _wait_for(self.store, f"{_PROMISE}/{len(places)}", _PAUSE_S)
            places += [tuple(json.loads(found))] if found else []
        self.stop.ask(_wait_for(self.store, _TOLD, _WAIT_S))
        with self._lock:
            end = self._decided(places)
        self.store.compare_set(_AGREED, "", str(end))


def _wait_for(store: dist.Store, key: str, seconds: float) -> str:
    """Returns a value as soon as it is set, or an empty text after that number of seconds."""
    until = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > until:
            return ""
        time.sleep(_PAUSE_S)
    return store.get(key).decode()
