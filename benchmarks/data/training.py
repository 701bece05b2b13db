"""A training run on a corpus, and the memory of its processes meanwhile."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gridformer.train.metrics import read_metrics
from gridformer.utils.units import MIB

_EVERY_S = 0.2


@dataclass(frozen=True)
class Watched:
    """What was seen of a run.

    Attributes:
        processor_s: Processor seconds of all processes of the run.
        first_step_s: Seconds from the command to the end of the first step.
        anonymous: (step, MiB) of memory of its own of all processes of the run, over time.
        waits: `data_wait_s` of every step.
        steps_s: `step_time_s` of every step.
    """

    processor_s: float
    first_step_s: float
    anonymous: list[tuple[int, float]]
    waits: list[float]
    steps_s: list[float]


def watch(run_file: Path, out: Path) -> Watched:
    """Runs `gridformer train` and watches it until its end."""
    command = [sys.executable, "-m", "gridformer", "train", str(run_file), "--out", str(out)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began, first, anonymous = time.perf_counter(), 0.0, []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        lines = [line for line in read_metrics(out) if line["step"]]
        if lines:
            first = first or time.perf_counter() - began
            anonymous.append((lines[-1]["step"], _anonymous(process.pid) / MIB))
        time.sleep(_EVERY_S)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}")
    lines = [line for line in read_metrics(out) if line["step"]]
    waits = [line["data_wait_s"] for line in lines]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Watched(used, first, anonymous, waits, [line["step_time_s"] for line in lines])


def _anonymous(pid: int) -> int:
    """Returns bytes of memory that are no pages of files, of a process and its children."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    except OSError:  # it has ended
        return 0
    found = 0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            found = int(line.split()[1]) * 1024
    return found + sum(_anonymous(int(child)) for child in children.split())
