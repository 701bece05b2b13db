"""What a failure is, which failure of a run explains its end, and how it is told."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from gridformer.launch.processes import signal_text
from gridformer.utils import files, signals
from gridformer.utils.errors import ConfigError, UserError
from gridformer.utils.units import format_bytes

if TYPE_CHECKING:
    from gridformer.train.plan import Plan

T = TypeVar("T")
Advise = Callable[[], str]  # returns a part of a sentence
_SEARCH_S, _LIMIT_S = 8.0, 20.0  # of the advice for a run that used up its memory
_LESS = 0.85  # of the estimate: settings that need no more than this are advised
_NO_LIMIT = 1 << 60  # version 1 of control groups has this or more instead of "no limit"
_NOT = (
    "but not by the kernel's out-of-memory killer, which has killed nothing meanwhile: someone, or "
    "the job's scheduler, sent it"
)
_ASKED_CPU = re.compile(r"you tried to allocate (\d+) bytes", re.IGNORECASE)
_ASKED_GPU = re.compile(r"Tried to allocate ([\d.]+ [KMGT]iB)")
_OF_GPU = re.compile(r"total capacity of ([\d.]+ [KMGT]iB)")
_ASKED_NUMPY = re.compile(r"Unable to allocate ([\d.]+ [KMGT]?i?B)")


def general() -> str:
    """Returns what helps any run that needs too much memory."""
    return "try a smaller batch, more micro_batches, or a layout that shards the model further"


def memory_advice(plan: Plan) -> str:
    """Returns the estimate of a run's memory and settings that lower it, in a sentence's words.

    This takes seconds, and must not be called in a process of the run.
    """
    with suppress(TimeoutError):
        return answered(partial(_estimate, plan), _LIMIT_S)
    return general()


def answered(question: Callable[[], T], seconds: float) -> T:
    """Asks a question in a thread of its own, which is left behind if it takes too long.

    Raises:
        TimeoutError: There is no answer in time, or the question raised an error.
    """
    answer: list[T] = []

    def ask() -> None:
        with suppress(Exception):
            answer.append(question())

    thread = threading.Thread(target=ask, daemon=True)
    with suppress(RuntimeError):  # no memory is left for its stack
        thread.start()
        thread.join(seconds)
    if not answer:
        raise TimeoutError
    return answer[0]


def _estimate(plan: Plan) -> str:
    from gridformer.memory.budget import Patience, nearest
    from gridformer.memory.estimate import estimate_ranks
    from gridformer.memory.ranks import largest_ranks

    run, decisions = plan.run, plan.decisions
    ranks = [*largest_ranks(run, decisions)]
    worst = max(estimate_ranks(run, ranks, decisions), key=lambda one: one.needed)
    text = (
        f"the estimate is {format_bytes(worst.needed)} on rank {worst.rank} (`gridformer memory`)"
    )
    patience = Patience(time.monotonic() + _SEARCH_S)
    offers = nearest(run, worst, round(_LESS * worst.needed), patience=patience)
    less = ", or ".join(f"{offer.settings} ({format_bytes(offer.peak)})" for offer in offers)
    return f"{text}: try {less}" if less else f"{text}: {general()}"


@dataclass(frozen=True)
class Failure:
    """A worker that failed."""

    rank: int
    pid: int | None
    exitcode: int
    message: dict[str, Any]  # the report that it wrote, empty if it wrote none
    killer: str = ""  # who killed it, by `kill_cause`
    stopped_by: str = ""  # what has stopped the run, where nothing has failed
    noticed: float = field(default_factory=time.time)

    @staticmethod
    def of_run(text: str) -> Failure:
        """Returns a failure of the run as a whole, which `text` tells."""
        return Failure(-1, None, 1, {"message": text, "report": text})

    @staticmethod
    def stopped(by: str, code: int) -> Failure:
        """Returns the end of a run that was stopped, which exits with a code."""
        return Failure(-1, None, code, {}, stopped_by=by)

    @property
    def caused_by_peer(self) -> bool:
        """Whether it only follows from the failure of another rank."""
        return bool(self.message.get("caused_by_peer"))

    @property
    def is_user_error(self) -> bool:
        """Whether a user can change what went wrong, so that it would go wrong again."""
        return "user_error" in self.message

    @property
    def ends_all(self) -> bool:
        """Whether no rank can do anything anymore: the run hangs, lost its ranks, cannot save."""
        return "report" in self.message and not self.caused_by_peer

    @property
    def told_to_stop(self) -> bool:
        """Whether it ended because a signal told it to stop."""
        codes = (signals.REQUEUE, *(128 + signum for signum in signals.SIGNALS))
        return bool(self.stopped_by) or (not self.message and self.exitcode in codes)

    def order(self) -> tuple[int, float]:
        """Sort key that puts the failure that explains the end of the run first.

        Workers that were killed or crashed come before those that raised an error, and these before
        those whose connection broke. NCCL's watchdog sends SIGABRT long after a peer has failed.
        """
        killed = self.exitcode < 0 and -self.exitcode != signal.SIGABRT and not self.message
        kind = 0 if killed else 3 if self.told_to_stop else 2 if self.caused_by_peer else 1
        return kind, self.message.get("time", self.noticed)

    @property
    def cause(self) -> str:
        """Why the worker failed, in one line."""
        if "report" in self.message:
            return str(self.message["message"])
        if self.message:
            whole = str(self.message["message"])
            return f"rank {self.rank} failed: {whole.strip().splitlines()[0]}"
        who = f"rank {self.rank} (pid {self.pid})"
        if self.exitcode >= 0:
            return f"{who} exited with code {self.exitcode} and no error message"
        by = f" {self.killer}" if self.killer else ""
        return f"{who} was killed by {signal_text(-self.exitcode)}{by}"

    def text(self, advise: Advise = general) -> str:
        """Returns all that is known of a failure that is no UserError: lines, the cause last."""
        message = self.message
        if "report" in message:
            return str(message["report"])
        if message:
            means = f" {message['meaning']}" if message.get("meaning") else ""
            if message.get("out_of_memory"):
                means += f"; {advise()}"
            stack = message["extraInfo"]["py_callstack"].rstrip()
            return f"rank {self.rank} failed:{means}\n\n{stack}"
        advice = ""
        if -self.exitcode == signal.SIGKILL:
            if not self.killer:
                advice = f": out of memory is the usual cause: {advise()}"
            elif self.killer != _NOT:
                advice = f": {advise()}"
        elif self.exitcode < 0:
            advice = ": it crashed in native code, see its output above"
        return f"{self.cause}{advice}"

    def report_and_exit(self, advise: Advise = general) -> NoReturn:
        """Prints why the worker failed and exits with the matching code, or raises its UserError.

        Raises:
            UserError: The worker raised it.
            SystemExit: In all other cases.
        """
        message, code = self.message, self.exitcode
        if self.is_user_error:
            if message.get("problems"):
                raise ConfigError(*message["problems"])
            error = UserError(message["user_error"])
            error.exit_code = message["exit_code"]
            raise error
        if self.told_to_stop:
            by = f"a signal or {signals.MAX_HOURS}"
            if code != signals.REQUEUE:
                by = f"{signal.Signals(code - 128).name} sent to rank {self.rank}"
            print_stopped(self.stopped_by or by, code)
            raise SystemExit(code)
        print_last(self.text(advise))
        raise SystemExit(1)


def oom_kills(root: Path = Path("/")) -> dict[Path, int]:
    """Returns the counters of the kernel's out-of-memory killer, which kills as `kill -9` does.

    They are those of this process's control groups, the innermost first, and of the whole machine.
    """
    counters = []
    for line in _text_of(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names in ("", "memory"):
            top = root / "sys/fs/cgroup" / names
            # In a container the path may be that of the host, which is not mounted here.
            for folder in (top / path.lstrip("/"), top):
                # Of versions 2 and 1
                counters += [folder / "memory.events", folder / "memory.oom_control"]
    counted = {}
    for file in (*counters, root / "proc/vmstat"):
        if kills := re.search(r"^oom_kill (\d+)$", _text_of(file), re.MULTILINE):
            counted[file] = int(kills[1])
    return counted


def kill_cause(before: dict[Path, int], after: dict[Path, int]) -> str:
    """Says whether SIGKILL between two counts of `oom_kills` was for want of memory.

    Returns:
        A part of a sentence; empty if the counters cannot tell.
    """
    for file, kills in after.items():
        if kills <= before.get(file, kills):
            continue
        if file.name == "vmstat":
            killer = "the kernel's out-of-memory killer"
            return f"most likely by {killer}, which has just killed a process"
        limits = [_text_of(file.with_name(f"memory.{name}")) for name in ("max", "limit_in_bytes")]
        known = [int(text) for text in map(str.strip, limits) if text.isdigit()]
        of = f", whose limit is {format_bytes(known[0])}" if known and known[0] < _NO_LIMIT else ""
        return f"by the kernel's out-of-memory killer, for its control group{of}"
    return _NOT if after else ""


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def cause_of(error: BaseException) -> str:
    """Returns what an error means and what to do, or an empty text if it speaks for itself."""
    if (text := out_of_memory(error)) is not None:
        return text
    if files.is_full(error):
        assert isinstance(error, OSError)
        return files.full_disk_message(error) + "; free some, or choose --out on another disk"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{os.strerror(error.errno).lower()}: raise the limit, such as by `ulimit -n 4096`"
    return ""


def out_of_memory(error: BaseException) -> str | None:
    """Returns what was asked for if an error means that memory is used up, otherwise None."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch
        asked, whole = _ASKED_GPU.search(text), _OF_GPU.search(text)
        of = f" of {whole[1]}" if whole else ""
        return f"the memory of the GPU{of} is used up" + _more(asked[1] if asked else "")
    host = "the memory of this machine, or what this process may have of it, is used up"
    if asked := _ASKED_CPU.search(text):
        return host + _more(format_bytes(int(asked[1])))
    if isinstance(error, MemoryError):
        asked = _ASKED_NUMPY.search(text)
        return host + _more(asked[1] if asked else "")
    return None


def _more(asked: str) -> str:
    return f": {asked} more were asked for" if asked else ""


def print_stopped(by: str, code: int = 0) -> None:
    """Prints the last line of a run that was stopped, such as by `SIGTERM`."""
    requeue = f"; exit code {code}: start it again to go on" if code == signals.REQUEUE else ""
    print_last(f"gridformer: stopped by {by.replace('SIGINT', 'Ctrl-C (SIGINT)', 1)}{requeue}")


def print_last(text: str) -> None:
    """Prints to standard error, after everything that has been printed to standard output."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
