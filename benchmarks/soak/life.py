"""The life of one run: it is started, hit by a fault, looked at, and started again."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak.disk import Disk
from benchmarks.soak.draw import LAYOUTS, Drawn, Fault
from benchmarks.soak.processes import LateError, Started
from benchmarks.soak.run_folder import RunFolder, damage, number_of

STEPS = 300  # on a busy machine a run does many before a fault comes
# A checkpoint takes more, and the lines of some hundred steps less.
_NO_CHECKPOINT_BYTES = 256 << 10
_ALL_DONE = f"has done {STEPS} of {STEPS} steps"
_WAITS_FOR_SPACE = re.compile(r".*the last checkpoint finds no space .* are free\).*")


@dataclass
class Met:
    """What became of a fault.

    Attributes:
        layout: In which it came.
        step: The last step that was done when it came; 0 before the first.
        said: What the run said about it.
        code: The exit code of what it ended; None if the run went on.
        resumed: The step from which the run went on.
        lost: How many steps had to be computed again.
        problems: What is not as it should be.
    """

    fault: Fault
    layout: str
    step: int = 0
    said: str = ""
    code: int | None = None
    resumed: int | None = None
    lost: int = 0
    problems: list[str] = field(default_factory=list)


class Life:
    """A run directory and the processes that write there, one start after the other.

    Args:
        drawn: The run, and what happens to it.
        run_file: The file of all runs.
        disk: Where the run directory is.
        logs: Where the output of each start is kept.
        temporary: An empty folder for the temporary files of the processes.
    """

    def __init__(self, drawn: Drawn, run_file: Path, disk: Disk, logs: Path, temporary: Path):
        self.drawn, self.run_file, self.disk, self.logs = drawn, run_file, disk, logs
        self.temporary = temporary
        self.out = disk.folder / f"run-{drawn.number}"
        self.folder = RunFolder(self.out)
        self.layout, self.moved = drawn.layout, False
        self.met: list[Met] = []
        self.too_late: list[Fault] = []  # those that were to come after the run's end
        self.problems: list[str] = []
        self.now: Started | None = None
        self.starts = 0
        self._settings: tuple[str, ...] = ()
        self._waiting: list[Met] = []  # what the next start must tell or clear up
        self._unswept: set[str] = set()
        self._unfinished: set[str] = set()  # what a killed start has left in the run directory
        self._step = 0  # up to which the run has come
        self._done = False

    def run(self) -> None:
        """Lets all faults happen, and then the run come to its end."""
        for fault in self.drawn.faults:
            if self._done or self.folder.done() >= STEPS:
                self.too_late.append(fault)
                continue
            met = Met(fault, self.layout)
            self.met.append(met)
            try:
                self._meet(met)
            except LateError as error:
                self._give_up(met.problems, error)
        try:
            if not self._done:
                self._ensure()
                assert self.now is not None
                self._resumed()
                self._ended(self.now.end(), (0,), self.problems)
        except LateError as error:
            self._give_up(self.problems, error)
        if found := self.folder.foreign():
            self.problems.append(f"left in the run directory: {', '.join(sorted(found))}")

    def last(self) -> Path:
        """Returns the checkpoint with which the run ends."""
        return self.out / "checkpoints" / f"step-{STEPS:08d}"

    # ------------------------------------------------------------------ starting

    def words(self) -> list[str]:
        """Returns the words after `gridformer` that start the run."""
        layout = [f"layout.{word}" for word in LAYOUTS[self.layout][1].split()]
        return ["train", str(self.run_file), "--out", str(self.out), *layout, *self._settings]

    def _start(self) -> Started:
        self.starts += 1
        log = self.logs / f"run-{self.drawn.number}-start-{self.starts}"
        return Started(self.words(), log, self.temporary)

    def _ensure(self, settings: tuple[str, ...] = (), layout: str | None = None) -> None:
        """Starts the run with settings unless it runs so already."""
        layout = layout or self.layout
        if self.now and ((settings and settings != self._settings) or layout != self.layout):
            if self._waiting:  # what this start is to tell or clear up
                self._resumed()
            self._stop()
        if not self.now:
            self._settings = settings
            self.moved = self.moved or (layout != self.layout and self._step > 0)
            self.layout = layout
            self.now = self._start()

    def _stop(self) -> None:
        """Stops the run by SIGTERM, which one that has done all steps may not notice any more."""
        now = self._running()
        os.kill(now.pid, signal.SIGTERM)
        code = now.end()
        ending = (0, -signal.SIGTERM) if self.folder.done() >= STEPS else ()
        self._ended(code, (75, *ending), self.problems)

    def _resumed(self) -> int:
        """Waits until the run trains; checks from where, and what that start had to clear up."""
        now = self._running()
        if not now.trained and not now.wait_until(lambda: now.trains(self.out)):
            if _ALL_DONE in now.said():  # the start before was stopped when it had done all steps
                return STEPS
            raise LateError(
                f"it ended before it trained, with code {now.code}: {_tail(now.said())}"
            )
        step = now.resumed_from()
        for met in self._waiting:
            met.resumed = step
            if met.fault.kind.act == "damage":
                self._check_said(met, now.said(), name=met.said)
        if self._waiting and step != self._newest_of_start:
            self.problems.append(f"resumed from {step} instead of {self._newest_of_start}")
        self._waiting = []
        if left := self._unswept & self._temporaries():
            self.problems.append(f"not swept by the next start: {', '.join(sorted(left))}")
        self._unswept = set()
        return step

    def _running(self) -> Started:
        if self.now is None:
            raise LateError("the run does not run")
        return self.now

    # ------------------------------------------------------------------ faults

    def _meet(self, met: Met) -> None:
        kind = met.fault.kind
        if kind.act == "damage":
            self._damage(met)
            return
        if kind.act == "second start" and kind.how == "same moment" and not self.now:
            self._ensure(layout=met.fault.layout)
            self._second(met)
            return
        fresh = self.now is None
        self._ensure(kind.settings, met.fault.layout)
        met.layout, now = self.layout, self._running()
        # What was damaged before is to be told by a start that comes as far as that.
        told = all(one.fault.kind.act != "damage" for one in self._waiting)
        if kind.how == "later":
            now.wait_until(lambda: (self.out / "lock").exists())
        elif met.fault.starting_s is not None and fresh and told:
            time.sleep(met.fault.starting_s)
            if now.trains(self.out):
                self._resumed()
        else:
            self._train(met.fault.steps)
        if now.code == 0:
            self._came_after_the_end(met)
            return
        if now.code is not None:
            raise LateError(f"the run ended before the fault, with code {now.code}")
        met.step = self.folder.done() if now.trains(self.out) else 0
        {"signal": self._signal, "full disk": self._full, "second start": self._second}[kind.act](
            met
        )

    def _train(self, steps: int) -> None:
        """Waits until the run has done some steps since its start."""
        now = self._running()
        aim = max(self._resumed(), self.folder.done()) + steps
        now.wait_until(lambda: self.folder.done() >= aim)

    def _signal(self, met: Met) -> None:
        kind, now = met.fault.kind, self._running()
        rank, pid = 0, now.pid
        if kind.target == "fork server":
            pid = now.fork_server()
        elif kind.target == "worker":
            rank = int(met.fault.part * LAYOUTS[self.layout][0])
            pid = now.rank(rank)
        before = len(now.said())
        trained = now.trains(self.out)
        os.kill(pid, kind.signum)
        if not kind.codes:
            self._goes_on(met, before, rank=rank, pid=pid)
            return
        met.code = now.end()
        # Before Python has its handlers, a signal ends the process as the system does.
        early = (-kind.signum, 128 + kind.signum) if not trained else ()
        unsaid = met.code < 0 or not trained  # nothing was done yet
        self._finish(met, (*kind.codes, *early))
        if not unsaid:
            self._check_said(met, now.said(), rank=rank, pid=pid)

    def _full(self, met: Met) -> None:
        now, kind = self._running(), met.fault.kind
        before = len(now.said())
        only_checkpoints = kind.how == "checkpoint"
        self.disk.fill(_NO_CHECKPOINT_BYTES if only_checkpoints else 0)
        try:
            if only_checkpoints:
                self._goes_on(met, before)
                return
            # A fast run may come to its end before it writes what nothing can do without, and then
            # waits for space.
            now.wait_until(lambda: bool(_WAITS_FOR_SPACE.search(now.said()[before:])))
        finally:
            self.disk.free()
        if waits := _WAITS_FOR_SPACE.search(now.said()[before:]):
            met.said = waits[0].strip()
            self._ended(now.end(), (0,), met.problems)
            self._done = True
        else:
            met.code = now.end()
            self._finish(met, kind.codes)
            self._check_said(met, now.said()[before:])

    def _second(self, met: Met) -> None:
        """Starts the run a second time; one of the two is refused, the other goes on."""
        first, second = self._running(), self._start()
        try:
            first.wait_until(lambda: first.code is not None or second.code is not None)
            if first.code is not None:
                first, second = second, first
            met.code = second.end()
            self.now = first
            if met.code == 0 and first.wait_until(lambda: _ALL_DONE in first.said()):
                self._came_after_the_end(met)
                return
            if met.code != 2:
                met.problems.append(f"exit code {met.code} instead of 2: {_tail(second.said())}")
            self._check_said(met, second.said(), pid=first.pid)
            if left := second.left():
                met.problems.append(f"processes left: {', '.join(left)}")
            going = first.trained or first.wait_until(lambda: first.trains(self.out))
            if not going or first.code not in (None, 0):
                met.problems.append(f"the other ended too: {_tail(first.said())}")
        finally:
            if second.code is None:
                second.kill_all()
        met.step = self.folder.done()

    def _came_after_the_end(self, met: Met) -> None:
        """Leaves out a fault that came only when the run had done all steps."""
        self._ended(self._running().end(), (0,), self.problems)
        self.met.remove(met)
        self.too_late.append(met.fault)
        self._done = True

    def _damage(self, met: Met) -> None:
        """Damages the newest checkpoint, while the run does not run."""
        if len(self._intact()) < 2 or self.now:
            self._ensure(layout=met.fault.layout)
            self._resumed()
            now = self._running()
            now.wait_until(lambda: len(self._intact()) >= 2)
            self._stop()
        met.layout = self.layout
        before, newest = self._intact()[-2:]
        met.step = number_of(newest)
        damage(newest, met.fault.kind.how, met.fault.part)
        met.said = newest.name  # until the next start has told it
        met.lost = number_of(newest) - number_of(before)
        self._waiting.append(met)
        self._newest_of_start = number_of(before)

    # ------------------------------------------------------------------ checks

    def _goes_on(self, met: Met, before: int, rank: int = 0, pid: int = 0) -> None:
        """Waits until a run that does not end has told what happened and trains again."""
        now = self._running()
        wanted = _pattern(met, rank=rank, pid=pid)
        if not now.wait_until(lambda: bool(wanted.search(now.said()[before:]))):
            if now.code == 0:
                self._came_after_the_end(met)
                return
            met.problems.append(f"it ended with {now.code}: {_tail(now.said())}")
            self._finish(met, ())
            return
        self._check_said(met, now.said()[before:], rank=rank, pid=pid)
        self.disk.free()
        if met.fault.kind.settings:  # this start's only restart is used up
            self._settings = ()
        if found := re.search(r"resumes from step (\d+)", met.said):
            met.resumed = int(found[1])
            met.lost = max(0, met.step - met.resumed)
            now.wait_until(lambda: now.trains(self.out))
        began = self._newest()
        now.wait_until(lambda: self._newest() > began)  # it saves again

    def _finish(self, met: Met, codes: tuple[int, ...]) -> None:
        """Looks at what a start has left that has ended by a fault."""
        now = self._running()
        done = self.folder.done() if now.trained else 0
        self._ended(now.end(), codes, met.problems)
        said = now.said()
        met.code, met.step = now.code, max(met.step, done)
        met.lost = max(0, done - self._newest())
        # Without space for a checkpoint a run goes on while metrics have some, and says so.
        if met.lost > met.fault.kind.lost and "no checkpoint was saved" not in said:
            met.problems.append(f"{met.lost} steps are lost")
        if "Traceback (most recent call last)" in said and not met.fault.kind.traceback:
            met.problems.append("a traceback")
        self._waiting.append(met)
        self._newest_of_start = self._newest()

    def _ended(self, code: int, codes: tuple[int, ...], problems: list[str]) -> None:
        """Checks the exit code of the present start, and what is left when it has ended."""
        now, self.now = self._running(), None
        if code not in codes:
            problems.append(f"exit code {code} instead of {codes}: {_tail(now.said())}")
        if left := now.left():
            problems.append(f"processes left: {', '.join(left)}")
            now.kill_all()
        self._step = self._newest()
        found = self._temporaries()
        if code < 0:  # it could not clear up; the next start does
            self._unswept |= found
            self._unfinished = self.folder.unfinished()
            return
        found = (found - self._unswept) | self.folder.unfinished()
        if not re.search(r"^ *step|resum", now.said(), re.MULTILINE):
            found -= self._unfinished  # it was stopped before it had come as far as clearing up
        else:
            self._unfinished = set()
        if found:
            problems.append(f"left after exit code {code}: {', '.join(sorted(found))}")

    def _check_said(self, met: Met, text: str, **names: object) -> None:
        """Looks for the sentence that explains a fault."""
        found = _pattern(met, **names).search(text)
        if found is None:
            met.problems.append(f"no explaining sentence in: {_tail(text)}")
            met.said = ""
        elif found[0]:
            begin = text.rfind("\n", 0, found.start()) + 1
            met.said = text[begin:].partition("\n")[0]

    def _give_up(self, problems: list[str], error: Exception) -> None:
        problems.append(str(error))
        self.disk.free()
        if self.now:
            self.now.kill_all()
            self.now = None
            self._unswept |= self._temporaries()

    def _temporaries(self) -> set[str]:
        """Returns what is in the folder for temporary files, but for the cache of torch."""
        names = os.listdir(self.temporary)
        return {name for name in names if not name.startswith("torchinductor_")}

    def _intact(self) -> list[Path]:
        """Returns the complete checkpoints that no fault has damaged, oldest first."""
        damaged = {met.said for met in self._waiting if met.fault.kind.act == "damage"}
        return [path for path in self.folder.checkpoints() if path.name not in damaged]

    def _newest(self) -> int:
        return max(map(number_of, self._intact()), default=0)


def _pattern(met: Met, **names: object) -> re.Pattern[str]:
    text = met.fault.kind.says
    for name, value in names.items():
        text = text.replace(f"{{{name}}}", re.escape(str(value)))
    return re.compile(text)


def _tail(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-3:])
