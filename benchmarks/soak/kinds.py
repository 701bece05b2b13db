"""The kinds of faults: what each does to a run, and what the run must do then."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Literal

SAVE_EVERY = 4
# A run that is killed loses what it has done since its last checkpoint. The newest may not be
# complete yet, because it is written beside the next steps.
KILLED = 2 * SAVE_EVERY

Act = Literal["signal", "full disk", "damage", "second start"]
Target = Literal["launcher", "fork server", "worker"]


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        title: What the table calls it.
        act: What is done.
        says: A regular expression for what the run must say; `{rank}`, `{pid}` and `{name}` stand
            for the process that was hit or the checkpoint that was damaged.
        codes: The exit codes with which the run may end; none if it goes on.
        lost: The largest number of steps that may be computed again.
        signum: The signal, for `act` "signal".
        target: Who gets the signal.
        settings: Overrides of the run file that the fault needs.
        in_starting: Whether it may also come before the first step.
        how: Which of several ways of `act` this is.
        traceback: Whether a rank itself fails, so that a traceback is to be expected.
    """

    title: str
    act: Act
    says: str
    codes: tuple[int, ...] = ()
    lost: int = 0
    signum: signal.Signals = signal.SIGKILL
    target: Target = "launcher"
    settings: tuple[str, ...] = field(default=())
    in_starting: bool = False
    how: str = ""
    traceback: bool = False

    @property
    def needs_workers(self) -> bool:
        """Whether the run must have several processes."""
        return self.target != "launcher"


_KILLED_RANK = r"rank {rank} \(pid {pid}\) was killed by signal 9 \(SIGKILL\)"
_FULL = r"the disk is full"
_FALLS_BACK = r"gridformer: .*{name}.*; resuming from .*, as train\.fallback=true says"

KINDS: tuple[Kind, ...] = (
    Kind("SIGKILL of the launcher", "signal", "", (-9,), KILLED, in_starting=True),
    Kind(
        "SIGKILL of the fork server",
        "signal",
        r"The fork server \(pid {pid}\), .* was killed by signal 9",
        (1,),
        target="fork server",
    ),
    Kind("SIGKILL of a worker", "signal", _KILLED_RANK, (1,), KILLED, target="worker"),
    Kind(
        "SIGKILL of a worker, `max_restarts=1`",
        "signal",
        rf"attempt 2 of 2 (resumes from step \d+|begins anew), as {_KILLED_RANK}",
        lost=KILLED,
        target="worker",
        settings=("train.max_restarts=1",),
    ),
    Kind(
        "SIGSTOP of a worker, `timeout_s=5`",
        "signal",
        r"The run hangs: rank {rank} \(pid {pid} on .*\) is stopped",
        (1,),
        KILLED,
        signal.SIGSTOP,
        "worker",
        ("train.timeout_s=5",),
    ),
    Kind(
        "SIGTERM",
        "signal",
        r"gridformer: stopped by SIGTERM.*; exit code 75",
        (75,),
        signum=signal.SIGTERM,
        in_starting=True,
    ),
    Kind(
        "SIGUSR1",
        "signal",
        r"gridformer: stopped by SIGUSR1.*; exit code 75",
        (75,),
        signum=signal.SIGUSR1,
    ),
    Kind(
        "SIGINT",
        "signal",
        r"gridformer: stopped by Ctrl-C \(SIGINT\)",
        (130,),
        signum=signal.SIGINT,
        in_starting=True,
    ),
    Kind(
        "no space for a checkpoint",
        "full disk",
        r"step \d+: no checkpoint was saved \(.*no space left on device.* are free\)",
        how="checkpoint",
    ),
    Kind("no space at all", "full disk", _FULL, (1,), 4 * KILLED, how="everything", traceback=True),
    Kind("a bit flipped in the newest checkpoint", "damage", _FALLS_BACK, how="flip"),
    Kind("a file of the newest checkpoint truncated", "damage", _FALLS_BACK, how="truncate"),
    Kind("a file of the newest checkpoint removed", "damage", _FALLS_BACK, how="remove"),
    Kind(
        "two starts at the same moment",
        "second start",
        r"is in use by process {pid} .*choose another --out",
        how="same moment",
    ),
    Kind(
        "a second start after the first",
        "second start",
        r"is in use by process {pid} .*choose another --out",
        how="later",
    ),
)
