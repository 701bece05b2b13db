"""A training run on a corpus, the memory of its processes meanwhile, and its waits for data."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gridformer.report.steptrace import read_timeline
from gridformer.train.metrics import read_metrics
from gridformer.utils.units import MIB

_EVERY_S = 0.2
_ROW = "wait for data"  # the name of these waits in the trace of a step


@dataclass(frozen=True)
class TracedStep:
    """What the Chrome trace of a step shows of reading.

    Attributes:
        step: The number of the step.
        wait_ms: The length of its row `wait for data`, the longest of all processes.
        length_ms: The length of the step.
    """

    step: int
    wait_ms: float
    length_ms: float


@dataclass(frozen=True)
class Watched:
    """What was seen of a run.

    Attributes:
        processor_s: Processor seconds of all processes of the run.
        first_step_s: Seconds from the command to the end of the first step.
        anonymous: (step, MiB) of memory of its own of all processes of the run, over time.
        waits: `data_wait_s` of every step.
        steps_s: `step_time_s` of every step.
        traced: What the trace of one of its steps shows.
    """

    processor_s: float
    first_step_s: float
    anonymous: list[tuple[int, float]]
    waits: list[float]
    steps_s: list[float]
    traced: TracedStep


def watch(run_file: Path, out: Path) -> Watched:
    """Runs `gridformer train` and watches it until its end. The run has `train.trace_step`."""
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
    seconds = [line["step_time_s"] for line in lines]
    [trace] = out.glob("trace-step-*.json")
    return Watched(used, first, anonymous, waits, seconds, traced_step(trace))


def traced_step(trace: Path) -> TracedStep:
    """Returns what a Chrome trace of `gridformer train` shows of reading.

    Raises:
        ValueError: The file has no row `wait for data` for some process.
    """
    line = read_timeline(trace)
    rows = [[one for one in row if one.kind == _ROW] for row in line.work] if line else []
    if line is None or not all(rows):
        raise ValueError(f"{trace} has no row `{_ROW}` for every process")
    waits = (sum(one.end - one.start for one in row) for row in rows)
    began = min(one.start for row in line.work for one in row)
    end = max(one.end for row in (*line.work, *line.waits) for one in row)
    return TracedStep(line.step, max(waits), end - began)


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
