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
import linecache
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from gridformer.comm import progress, progress_file
from gridformer.launch.hang import diagnose_hang
from gridformer.launch.hang_board import HangBoard, asks_s
from gridformer.launch.hang_report import RankReport, all_ranks, hang_text, reports
from gridformer.launch.processes import process_state
from gridformer.launch.worker_process import end_after_peer, end_with_report
from gridformer.mesh.launch_env import RankEnv, rank_env
from gridformer.mesh.process_group import World

MARGIN_S = 9.0  # torch's own timeouts come this much later than the watch
_LOOKS_S = 1.0  # between two looks, or an eighth of the timeout if that is less
_DEEPEST = 40  # calls that are kept of a stack
_NODES = 200  # of the graph that are looked at to find a parameter
_SAMPLES, _APART_S = 6, 0.15  # of the stack of a rank, once the run hangs
_ANSWERS_S = 3.0  # how long the first rank waits for what others see
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
    """Starts to watch this process, unless it is the only one.

    Args:
        world: The processes.
        timeout_s, out, limit, trains: See `HangWatch`.
    """
    place = rank_env()
    if place is None or world.size == 1:
        return None
    return HangWatch(place, timeout_s, out, world.backend == "nccl", limit, trains)


class HangWatch:
    """Watches this process from a thread of its own.

    Args:
        place: The place of this process in the run.
        timeout_s: Seconds after which a message that still waits is a hang.
        out: The run directory, in which the report is written; None writes none.
        nccl: Whether messages run on GPUs, where the host waits elsewhere than in messages.
        limit: What users call the limit.
        trains: Whether the run has steps, before the first of which nothing is known over NCCL.
    """

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
        self.where = StackLocation()
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
        ask_s, asked = asks_s(self.place.size), time.monotonic()
        while not self._ended.wait(look_s):
            hangs, now = self._beat(), time.monotonic()
            if not hangs and now - asked >= ask_s:
                asked = now
                with suppress(TimeoutError):
                    if self._board.is_claimed():
                        self._tell(False)
                        return
                    if who := self._board.failed():
                        # Over gloo connections break, and it raises an error.
                        if not self._ended.wait(_LINGERS_S):
                            end_after_peer(who)
                        return
            if hangs:
                self._tell(True)
                return

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
                last, stack = at, self.where.stack(frame)
                with suppress(Exception):  # it looks into frames that run meanwhile
                    module = self.where.module(frame)
            if number + 1 < _SAMPLES:
                time.sleep(_APART_S)
        used = (time.process_time() - cpu) / max(1e-9, time.monotonic() - began)
        frames = sys._current_frames()
        threads = {
            thread.name: tuple(self.where.stack(frames[thread.ident]))
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
            nccl=_flight_records() if self.nccl else None,
        )

    def _neighbors(self) -> tuple[RankReport, ...]:
        """Returns what is known of the processes of this machine that cannot tell themselves."""
        found: list[RankReport] = []
        for rank, path in self._board.neighbors().items():
            state = progress_file.read(path)
            letter = process_state(state.pid) if state else ""
            if status := _STATUS.get(letter, "silent" if state and state.beat_s > _QUIET_S else ""):
                found.append(RankReport(rank, status, state, socket.gethostname()))
        return tuple(found)

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
        end_with_report(text)


def _flight_records() -> Any:
    """Returns `progress.flight_records()`, or None if torch does not answer soon."""
    answer: list[Any] = []
    thread = threading.Thread(
        target=lambda: answer.append(progress.flight_records()), name="flight recorder", daemon=True
    )
    thread.start()
    thread.join(_RECORDS_S)  # torch asks the GPU, which may not answer
    return answer[0] if answer else None


class StackLocation:
    """Names places of the model of this process.

    Attributes:
        model: The model, once there is one.
    """

    def __init__(self) -> None:
        self.model: nn.Module | None = None

    def stack(self, frame: FrameType) -> list[str]:
        """Returns the calls of a thread, the innermost last, as a traceback shows them."""
        calls = []
        for call, number in [*traceback.walk_stack(frame)][:_DEEPEST]:
            name = call.f_code.co_filename
            # Between two lines, such as on leaving a `with`, Python may know none.
            source = linecache.getline(name, number or 0).strip()
            text = f'  File "{name}", line {number or "?"}, in {call.f_code.co_name}\n'
            calls.append(text + (f"    {source}\n" if source else ""))
        return calls[::-1]

    def module(self, frame: FrameType) -> str:
        """Returns the part of the model in which a thread is; empty if it is in none.

        In a forward pass this is the innermost module on the stack. In a backward pass there are no
        modules on the stack, but the autograd function that runs, and the next parameter of its
        graph is one of the same module or of the one before it.
        """
        if self.model is None:
            return ""
        modules = {id(module): name for name, module in self.model.named_modules()}
        for call, _ in traceback.walk_stack(frame):
            found = call.f_locals
            if (name := modules.get(id(found.get("self")))) is not None:
                return f"{name or 'the model'} (forward)"
            node = found.get("ctx")  # also in the forward pass of an autograd function
            if call.f_code.co_name == "backward" and hasattr(node, "next_functions"):
                parameter = self._next_parameter(node)
                return f"the backward pass near {parameter}" if parameter else "the backward pass"
        return ""

    def _next_parameter(self, node: Any) -> str:
        assert self.model is not None
        names = {id(p): name for name, p in self.model.named_parameters()}
        waiting, seen = deque([node]), {node}
        while waiting and len(seen) < _NODES:
            for found, _ in waiting.popleft().next_functions:
                if found is None or found in seen:
                    continue
                name = names.get(id(getattr(found, "variable", None)))
                if name is not None:
                    return name
                seen.add(found)
                waiting.append(found)
        return ""
