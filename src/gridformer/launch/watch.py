"""The watch of a run: a thread in each rank that notices a hang, and names it.

When a rank has waited longer than its limit (train.timeout_s) for a message, it says so on the
run's board, and every rank that can tells there where it is: for which message it waits, its stack,
and whether it computes. For the processes of its machine that cannot tell, because they are stopped
or dead, it tells what their progress files and the system say. The rank that was first then
collects all this, says why the run hangs (`gridformer.launch.hang`), writes it to the run
directory, and ends the run.

All of this is over within MARGIN_S, and only then do torch's own timeouts end what is left.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from gridformer.comm import progress, progress_file
from gridformer.launch import seen as telling
from gridformer.launch.boards import Board, FolderBoard, Report, asks_s, board_of, process_state
from gridformer.launch.hang import (
    Seen,
    Verdict,
    diagnose_hang,
    lane_name,
    progress_line,
    ranks_in_words,
)
from gridformer.launch.where import Where
from gridformer.mesh.launch_env import Joined

MARGIN_S = 9.0  # torch's own timeouts come this much later than the watch
_LOOKS_S = 1.0  # between two looks, or an eighth of the timeout if that is less
_SAMPLES, _APART_S = 6, 0.15  # of the stack of a rank, once the run hangs
_ANSWERS_S = 3.0  # how long the first rank waits for what others see
_LEAVES_S = 25.0  # a rank ends by itself this long after it told what it saw
_CALLS = 8  # shown of a stack; the file has them all
_RECORDS_S = 1.5  # for torch's records of messages
_END_S = 2.0  # how long the end of a run waits for the watch, which may ask a store that is gone
_LINGERS_S = 2.0  # from when a peer has failed until this process is ended for it
_QUIET_S = 2.5  # a watch that has not looked for this long is not running


class HangWatch:
    """Watches this process from a thread of its own.

    Args:
        place: The place of this process in the run.
        timeout_s: Seconds after which a message that still waits is a hang.
        out: The run directory, in which the report is written; None writes none.
        fail: Called with the report on the rank that noticed first; it ends the process.
        nccl: Whether messages run on GPUs, where the host waits elsewhere than in messages.
        limit: What users call the limit.
        peer_failed: Called with the name of a rank that has failed; it ends the process.
        trains: Whether the run has steps, before the first of which nothing is known over NCCL.
    """

    def __init__(
        self,
        place: Joined,
        timeout_s: float,
        out: Path | None,
        fail: Callable[[str], None],
        nccl: bool = False,
        limit: str = "train.timeout_s",
        trains: bool = True,
        peer_failed: Callable[[str], None] = lambda who: None,
    ) -> None:
        self.place, self.timeout_s, self.out, self.nccl = place, timeout_s, out, nccl
        self._limit, self._trains = limit, trains
        self._fail, self._peer_failed = fail, peer_failed
        self._board: Board = board_of(place)
        own = None
        if isinstance(self._board, FolderBoard):
            own = self._board.progress_file(place.rank)
        self._progress = progress.start(own)
        with suppress(TimeoutError):
            self._board.register(self._progress.path)
        self.where = Where()
        self._main = threading.main_thread().ident or 0
        self._ended = threading.Event()
        self._still_since = time.monotonic()
        self._still: tuple[int, ...] = (0,)
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the watch; the run has ended.

        The thread must not outlive the main thread: it may hold the last reference to tensors, and
        freeing one while Python ends aborts the process.
        """
        self._ended.set()
        self._thread.join(_END_S)
        progress.stop()

    def _run(self) -> None:
        look_s = min(_LOOKS_S, self.timeout_s / 8)
        ask_s = 0.0 if self.place.store_file else asks_s(self.place.size)
        asked = time.monotonic()
        while not self._ended.wait(look_s):
            hangs, now = self._beat(), time.monotonic()
            if not hangs and now - asked >= ask_s:
                asked = now
                with suppress(TimeoutError):
                    if self._board.is_claimed():
                        self._tell(False)
                        return
                    if who := self._board.failed():
                        self._leave(who)
                        return
            if hangs:
                self._tell(True)
                return

    def _leave(self, who: str) -> None:
        """Ends this process because another one has failed, unless that ends it anyway."""
        if not self._ended.wait(_LINGERS_S):  # over gloo connections break, and it raises an error
            self._peer_failed(who)

    def _beat(self) -> bool:
        """Notes where this process is, and returns whether it hangs.

        The main thread's frame is held no longer than that, because it keeps all tensors of its
        functions alive, even after these have returned.
        """
        self._progress.beat()
        frame = sys._current_frames().get(self._main)
        if frame is not None:
            self._progress.put_stack("".join(self.where.stack(frame)))
        return self._hangs(frame)

    def _hangs(self, frame: FrameType | None) -> bool:
        """Returns whether this process has waited for too long.

        Over NCCL the host waits wherever it reads from the GPU, which may wait for a message. There
        a process hangs whose main thread has been in one place for that long in the middle of a
        step, without beginning a message. The place alone says little: a GPU that is busy is waited
        for in the same place in every step.
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
            report["state"] = telling.to_json(at_claim)
        reports = {self.place.rank: report}
        with suppress(TimeoutError):
            report["neighbors"] = self._neighbors()
            self._board.publish(report)
        if first:
            if not lost:
                with suppress(TimeoutError):
                    reports |= self._collect()
            self._conclude(reports, lost)
        elif not self._ended.wait(_LEAVES_S):
            os._exit(1)  # the first rank has ended, and this one only waits for it

    def _look(self) -> Report:
        """Samples the stack of the main thread and its processor time."""
        began, cpu = time.monotonic(), time.process_time()
        moved, last, stack, module = 0, None, [], ""
        for number in range(_SAMPLES):
            frame = sys._current_frames().get(self._main)
            if frame is not None:
                at = tuple((id(f.f_code), f.f_lasti) for f, _ in traceback.walk_stack(frame))
                moved += last is not None and at != last
                last, stack = at, self.where.stack(frame)
                with suppress(Exception):  # it looks into frames that run meanwhile
                    module = self.where.module(frame)
            if number + 1 < _SAMPLES:
                time.sleep(_APART_S)
        used = (time.process_time() - cpu) / max(1e-9, time.monotonic() - began)
        frames = sys._current_frames()
        threads = {
            thread.name: self.where.stack(frames[thread.ident])
            for thread in threading.enumerate()
            if thread.ident in frames and thread.ident not in (self._main, threading.get_ident())
        }
        return {
            "rank": self.place.rank,
            "host": socket.gethostname(),
            "state": telling.to_json(self._progress.read()),
            "module": module,
            "moved": moved,
            "cpu": round(used, 3),
            "stack": stack,
            "threads": threads,
            **({"nccl": _flight_records()} if self.nccl else {}),
        }

    def _neighbors(self) -> dict[str, Any]:
        """Returns what is known of the processes of this machine that cannot tell themselves."""
        found: dict[str, Any] = {}
        for rank, path in self._board.neighbors().items():
            if rank == self.place.rank:
                continue
            state = progress_file.read(path)
            if state is None:
                found[str(rank)] = {"status": "dead", "state": None}
                continue
            letter = process_state(state.pid)
            if letter in ("", "Z", "X"):
                status = "dead"
            elif letter in ("T", "t"):
                status = "stopped"
            elif state.beat_s > _QUIET_S:
                status = "silent"
            else:
                continue
            found[str(rank)] = {"status": status, "state": telling.to_json(state)}
        return found

    def _collect(self) -> dict[int, Report]:
        """Returns what the other ranks see, as far as they tell within seconds."""
        until = time.monotonic() + _ANSWERS_S
        others = {*range(self.place.size)} - {self.place.rank}
        found: dict[int, Report] = {}
        while others and time.monotonic() < until:
            found |= self._board.published(others)
            others -= {*found}
            gone = {int(rank) for report in found.values() for rank in report.get("neighbors", {})}
            if others <= gone:
                break
            time.sleep(0.1)
        return found

    def _conclude(self, reports: Mapping[int, Report], lost: bool) -> None:
        ranks = telling.ranks_of(reports, self.place.size)
        verdict = diagnose_hang(ranks, self.place.rank, self._limit, queued=self.nccl)
        text = self._text(ranks, verdict, lost)
        if self.out is not None:
            text += self._kept(self.out, reports, verdict, text)
        self._fail(text)

    def _kept(self, out: Path, reports: Mapping[int, Report], verdict: Verdict, text: str) -> str:
        """Writes all that ranks have told to the run directory, and returns a line about it."""
        path = out / f"hang-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
        content = {
            "reason": verdict.reason,
            "kind": verdict.kind,
            "culprits": verdict.culprits,
            "noticed_by": self.place.rank,
            "arrived": verdict.arrived,
            "missing": verdict.missing,
            "report": text.splitlines(),
            "ranks": {str(rank): report for rank, report in sorted(reports.items())},
        }
        try:
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            return f"\nThe report of all ranks could not be written: {error}."
        return f"\nAll ranks' messages and stacks are in {path}."

    def _text(self, ranks: Mapping[int, Seen], verdict: Verdict, lost: bool) -> str:
        """Returns what a user reads last."""
        first, lines = ranks[verdict.witness], []
        for rank in dict.fromkeys([first.rank, *verdict.culprits[:3]]):
            lines += _stack_text(ranks[rank])
        lines.append(f"The run hangs: {verdict.reason}.")
        if (wait := first.wait) is not None:
            step = f", in step {first.state.step}" if first.state and first.state.step else ""
            module = f", in {first.module}" if first.module else ""
            arrived = ranks_in_words(verdict.arrived)
            if not verdict.missing and verdict.kind != "late":
                arrived += ", which does not mean that each could finish it"
            missing = f" Missing: {ranks_in_words(verdict.missing)}." if verdict.missing else ""
            lines += [
                f"Rank {first.rank} has waited {wait.seconds:.1f} s ({self._limit}="
                f"{self.timeout_s:g}) in {wait.message}, message {wait.number} of "
                f"{lane_name(wait.lane)}{step}{module}.",
                f"Arrived: {arrived}.{missing}",
            ]
        else:
            lines.append(
                f"Rank {self.place.rank} has been in one place for {self.timeout_s:g} s "
                f"({self._limit}). Over NCCL a process does not wait in a message but where it "
                "reads from the GPU, and the messages below may have been started, not finished."
            )
        if lost:
            lines.append(
                "The store of the run, which torchrun or, with srun, rank 0 serves, does not "
                "answer, so nothing is known of other machines."
            )
        others = [rank for rank in sorted(ranks) if rank != first.rank]
        shown = sorted({*others[:8], *verdict.culprits[:8]} - {first.rank})
        lines += [progress_line(ranks[rank], self._trains) for rank in shown]
        if len(others) > len(shown):
            lines.append(f"and {len(others) - len(shown)} other ranks")
        return "\n".join(lines)


def _stack_text(seen: Seen) -> list[str]:
    """Returns the innermost calls of a rank as lines."""
    if not seen.stack:
        return []
    age = ""
    if seen.status != "answers" and seen.state:
        age = f", as it was {seen.state.stack_s:.0f} s ago"
    calls = [number for number, line in enumerate(seen.stack) if line.startswith("  File ")]
    lines = seen.stack[calls[-_CALLS] :] if len(calls) > _CALLS else seen.stack
    return [f"Stack of rank {seen.rank}{age}:", *(line.rstrip() for line in lines)]


def _flight_records() -> Any:
    """Returns `progress.flight_records()`, or None if torch does not answer soon."""
    answer: list[Any] = []
    thread = threading.Thread(
        target=lambda: answer.append(progress.flight_records()), name="flight recorder", daemon=True
    )
    thread.start()
    thread.join(_RECORDS_S)  # torch asks the GPU, which may not answer
    return answer[0] if answer else None
