"""The watch of a run: a thread in each rank that notices a hang, and names it.

When a rank has waited longer than train.timeout_s for a message, every rank reports where it is,
and which processes of its machine are stopped or dead. The first such rank says why the run hangs
and ends it within MARGIN_S, before torch's own timeouts end what is left.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from gridformer.comm import progress, progress_file
from gridformer.launch.failures import answered
from gridformer.launch.hang import diagnose_hang
from gridformer.launch.hang_report import (
    RankReport,
    all_ranks,
    hang_text,
    module_of,
    reports,
    stack_of,
)
from gridformer.launch.processes import process_state
from gridformer.launch.worker_process import at_failure, end_from_watch
from gridformer.mesh.launch_env import RankEnv, rank_env
from gridformer.mesh.process_group import World
from gridformer.mesh.rendezvous import store_of

MARGIN_S = 9.0  # torch's own timeouts come this much later than the watch
_LOOKS_S = 1.0  # between two looks, or an eighth of the timeout if that is less
_ASKS_S = 2.0  # between two questions to the store of the run, or more if it is large
_ANSWER_S = 4.0  # the store answers within milliseconds, or hangs itself
_SAMPLES, _APART_S = 6, 0.15  # of the stack of a rank, once the run hangs
_ANSWERS_S = 3.0  # how long the first rank waits for the reports of the others
_LEAVES_S = 25.0  # a rank ends by itself this long after it told what it saw
_RECORDS_S = 1.5  # for torch's records of messages
_END_S = 2.0  # how long the end of a run waits for the watch, which may ask a store that is gone
_LINGERS_S = 2.0  # from when a peer has failed until this process is ended for it
_QUIET_S = 2.5  # a watch that has not looked for this long is not running
_STATUS = {"": "dead", "Z": "dead", "X": "dead", "T": "stopped", "t": "stopped"}  # see proc(5)


class UseWatch:
    """Starts the watch of commands that use a trained model; see `gridformer.evaluate.loading.Job`.

    Nothing is written to the run directory, which such commands only read.
    """

    margin_s = MARGIN_S

    def start(self, world: World, timeout_s: float) -> HangWatch | None:
        """Starts to watch this process; see `start_watch`."""
        return start_watch(world, timeout_s, None, "--timeout", trains=False)


def start_watch(
    world: World,
    timeout_s: float,
    out: Path | None,
    limit: str = "train.timeout_s",
    trains: bool = True,
) -> HangWatch | None:
    """Starts to watch this process with a `HangWatch`, unless it is the only one."""
    place = rank_env()
    if place is None or world.size == 1:
        return None
    return HangWatch(place, timeout_s, out, world.backend == "nccl", limit, trains)


class HangBoard:
    """Where the ranks of a run tell each other that it hangs, and what each of them sees.

    This is the store of the rendezvous. Every method raises TimeoutError when the store does not
    answer, because the hang may be in the process that serves it.
    """

    def __init__(self, place: RankEnv) -> None:
        self.place = place
        store: Any = store_of(place)
        self._store = store.clone()  # a connection of its own
        # `launch` ends its processes itself; torchrun and srun do so on their own machine or late.
        if not place.store_file:
            at_failure.append(self.tell_failed)

    def register(self, path: Path | None) -> None:
        """Tells the file with the progress of this rank to the others of this machine."""
        self._set("place", self.place.rank, json.dumps([socket.gethostname(), str(path or "")]))

    def is_claimed(self) -> bool:
        """Returns whether a rank has found that the run hangs."""
        return bool(self._get("hang"))

    def failed(self) -> str:
        """Returns which rank has failed, or nothing."""
        return self._get("failed")

    def tell_failed(self) -> None:
        """Tells the others that this rank has failed, who over NCCL spin in messages to it."""
        with suppress(TimeoutError):
            self._set("failed", "", f"rank {self.place.rank} on {socket.gethostname()}")
            if self.place.rank == 0 and self.place.by == "srun":
                # The store of the run is in this process. All ranks ask it in this time.
                time.sleep(1.5 * asks_s(self.place.size))

    def claim(self) -> bool:
        """Says that the run hangs. Returns whether this rank is the first to do so."""
        first = answered(lambda: self._store.add("watch/claims", 1), _ANSWER_S) == 1
        self._set("hang", "", str(self.place.rank))
        return first

    def publish(self, report: RankReport) -> None:
        """Publishes the report of this rank."""
        self._set("seen", self.place.rank, reports().dump_json(report).decode())

    def published(self, ranks: Iterable[int]) -> dict[int, RankReport]:
        """Returns the reports of the given ranks that have published one."""
        texts = {rank: self._get("seen", rank) for rank in ranks}
        return {rank: reports().validate_json(text) for rank, text in texts.items() if text}

    def neighbors(self) -> dict[int, Path]:
        """Returns where the progress of each other rank of this machine can be read."""
        here, paths = socket.gethostname(), {}
        for rank in {*range(self.place.size)} - {self.place.rank}:
            host, path = json.loads(self._get("place", rank) or '["", ""]')
            if host == here and path:
                paths[rank] = Path(path)
        return paths

    def _set(self, what: str, rank: int | str, text: str) -> None:
        answered(lambda: self._store.set(f"watch/{what}/{rank}", text), _ANSWER_S)

    def _get(self, what: str, rank: int | str = "") -> str:
        """Returns a text, or an empty one if there is none."""
        key = f"watch/{what}/{rank}"
        check, get = self._store.check, self._store.get
        return str(answered(lambda: get(key).decode() if check([key]) else "", _ANSWER_S))


def asks_s(size: int) -> float:
    """Returns after how many seconds each of `size` ranks asks the store of the run again."""
    return max(_ASKS_S, size / 250)  # it answers about a thousand questions a second


class HangWatch:
    """Watches this process from a thread of its own.

    Args:
        timeout_s: Seconds after which a message that still waits is a hang.
        out: The run directory, in which the report is written; None writes none.
        nccl: Whether messages run on GPUs, where the host waits elsewhere than in messages.
        limit: What users call the limit.
        trains: Whether the run has steps, before the first of which nothing is known over NCCL.
    """

    model: nn.Module | None = None  # once there is one

    def __init__(
        self,
        place: RankEnv,
        timeout_s: float,
        out: Path | None,
        nccl: bool = False,
        limit: str = "train.timeout_s",
        trains: bool = True,
    ) -> None:
        self.place, self.timeout_s, self.out, self.nccl = place, timeout_s, out, nccl
        self._limit, self._trains = limit, trains
        self._board = HangBoard(place)
        own = None
        if place.store_file:
            own = Path(place.store_file).with_name(f"progress-{place.rank}")
        self._progress = progress.start(own)
        with suppress(TimeoutError):
            self._board.register(self._progress.path)
        self._main = threading.main_thread().ident or 0
        self._ended = threading.Event()
        self._still_since = time.monotonic()
        self._still: tuple[int, ...] = (0,)
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the watch before the main thread ends.

        It may hold the last reference to tensors, and freeing one while Python ends aborts it.
        """
        self._ended.set()
        self._thread.join(_END_S)
        progress.stop()

    def _run(self) -> None:
        look_s = min(_LOOKS_S, self.timeout_s / 8)
        ask_s, asked = asks_s(self.place.size), time.monotonic()
        while not self._ended.wait(look_s):
            if self._beat():
                return self._tell(True)
            if time.monotonic() - asked < ask_s:
                continue
            asked = time.monotonic()
            with suppress(TimeoutError):
                if self._board.is_claimed():
                    return self._tell(False)
                if who := self._board.failed():
                    # Over gloo connections break, and it raises an error.
                    if not self._ended.wait(_LINGERS_S):
                        text = f"rank {self.place.rank} ends because {who} has failed"
                        end_from_watch(text, text, caused_by_peer=True)
                    return None
        return None

    def _beat(self) -> bool:
        """Notes where this process is, and returns whether it hangs.

        The frame is held no longer than that, as it keeps all tensors of its functions alive.
        """
        self._progress.beat()
        frame = sys._current_frames().get(self._main)
        if frame is not None:
            self._progress.put_stack("".join(stack_of(frame)))
        return self._hangs(frame)

    def _hangs(self, frame: FrameType | None) -> bool:
        """Returns whether this process has waited for too long.

        Over NCCL the host waits wherever it reads from the GPU. There a process hangs whose main
        thread has been in one place for that long in the middle of a step, without a new message.
        """
        if self._progress.waited_s() > self.timeout_s:
            return True
        if not self.nccl or frame is None:
            return False
        still = (id(frame), frame.f_lasti, *self._progress.noted())
        now = time.monotonic()
        if still != self._still:
            self._still, self._still_since = still, now
        began = not self._trains or self._progress.read().step > 0
        return now - self._still_since > self.timeout_s and began

    def _tell(self, noticed: bool) -> None:
        """Tells what this rank sees; the first rank that noticed the hang ends the run."""
        first, lost = False, False
        at_claim = self._progress.read()
        try:
            first = self._board.claim() if noticed else False
        except TimeoutError:
            first = lost = True
        report = self._look()
        if first and at_claim.wait is not None:  # even if it has ended by now
            report = replace(report, state=at_claim)
        with suppress(TimeoutError):
            report = replace(report, neighbors=self._neighbors())
            self._board.publish(report)
        if not first:
            if not self._ended.wait(_LEAVES_S):
                os._exit(1)  # the first rank has ended, and this one only waits for it
            return
        told = {self.place.rank: report}
        if not lost:
            with suppress(TimeoutError):
                self._collect(told)
        self._conclude(told, lost)

    def _look(self) -> RankReport:
        """Samples the stack of the main thread and its processor time."""
        began, cpu = time.monotonic(), time.process_time()
        moved, last, module = 0, None, ""
        stack: list[str] = []
        for number in range(_SAMPLES):
            frame = sys._current_frames().get(self._main)
            if frame is not None:
                at = tuple((id(f.f_code), f.f_lasti) for f, _ in traceback.walk_stack(frame))
                moved += last is not None and at != last
                last, stack = at, stack_of(frame)
                with suppress(Exception):  # it looks into frames that run meanwhile
                    module = module_of(frame, self.model)
            if number + 1 < _SAMPLES:
                time.sleep(_APART_S)
        used = (time.process_time() - cpu) / max(1e-9, time.monotonic() - began)
        records = None
        if self.nccl:
            with suppress(TimeoutError):  # torch asks the GPU, which may not answer
                records = answered(progress.flight_records, _RECORDS_S)
        frames = sys._current_frames()
        threads = {
            thread.name: tuple(stack_of(frames[thread.ident]))
            for thread in threading.enumerate()
            if thread.ident in frames and thread.ident not in (self._main, threading.get_ident())
        }
        return RankReport(
            self.place.rank,
            state=self._progress.read(),
            host=socket.gethostname(),
            module=module,
            moved=moved,
            cpu=round(used, 3),
            stack=tuple(stack),
            threads=threads,
            nccl=records,
        )

    def _neighbors(self) -> tuple[RankReport, ...]:
        """Returns reports of the processes of this machine that cannot tell themselves."""
        silent: list[RankReport] = []
        for rank, path in self._board.neighbors().items():
            state = progress_file.read(path)
            letter = process_state(state.pid) if state else ""
            if status := _STATUS.get(letter, "silent" if state and state.beat_s > _QUIET_S else ""):
                silent.append(RankReport(rank, status, state, socket.gethostname()))
        return tuple(silent)

    def _collect(self, told: dict[int, RankReport]) -> None:
        """Adds what the other ranks see, as far as they tell within seconds."""
        until = time.monotonic() + _ANSWERS_S
        while time.monotonic() < until:
            others = {*range(self.place.size)} - {*told}
            told |= self._board.published(others)
            if {*all_ranks(told, 0)} >= others:
                return
            time.sleep(0.1)

    def _conclude(self, told: dict[int, RankReport], lost: bool) -> None:
        ranks, rank = all_ranks(told, self.place.size), self.place.rank
        verdict = diagnose_hang(ranks, rank, self._limit, queued=self.nccl)
        text = hang_text(ranks, verdict, rank, f"{self._limit}={self.timeout_s:g}", self._trains)
        if lost:
            text += (
                "\nThe store of the run, which torchrun or, with srun, rank 0 serves, does not "
                "answer, so nothing is known of other machines."
            )
        if self.out is not None:
            path = self.out / f"hang-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
            content = {
                **asdict(verdict),
                "noticed_by": rank,
                "report": text.splitlines(),
                "ranks": {r: reports().dump_python(told[r], mode="json") for r in sorted(told)},
            }
            try:
                path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
                text += f"\nAll ranks' messages and stacks are in {path}."
            except OSError as error:
                text += f"\nThe report of all ranks could not be written: {error}."
        end_from_watch(f"The run hangs: {verdict.reason}.", text, report=text)
