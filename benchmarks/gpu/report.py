"""Helpers that all measurements of `benchmarks.gpu` share: the device, its clock, and Markdown."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from gridformer.utils.units import GIB


@dataclass
class Report:
    """Prints Markdown as it is written, and appends it to a file if one is given.

    Attributes:
        numbers: A file to which `keep` appends numbers, one JSON object a line.
    """

    file: Path | None = None
    numbers: Path | None = None
    began: float = field(default_factory=time.monotonic)

    def write(self, text: str) -> None:
        print(text, flush=True)
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as out:
                out.write(text + "\n")

    def keep(self, **values: object) -> None:
        """Append numbers to the file for them, if there is one."""
        if self.numbers is not None:
            command = shlex.join(sys.argv)
            with self.numbers.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"command": command, **values}, default=str) + "\n")

    def progress(self, text: str) -> None:
        """Print progress and the seconds since the start to stderr; the report omits it."""
        print(f"[{self.seconds:6.1f} s] {text}", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        """Return the seconds since the report was opened."""
        return time.monotonic() - self.began

    def heading(self, title: str, device: torch.device, quick: bool) -> None:
        """Write a title and what a reader needs to repeat the measurement."""
        command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
        self.write(f"\n## {title}\n\n{describe(device)}\n\n`{command}`\n")
        if quick:
            self.write("Tiny sizes: this shows that the code works; the figures mean nothing.\n")


def choose_device(name: str) -> torch.device:
    """Return the device of that name.

    Raises:
        ValueError: This machine lacks it; the message shows how to run on the CPU instead.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "torch finds no GPU on this machine: `--device cpu --quick` runs the same code on a "
            "tiny model; `gridformer doctor` shows what torch finds"
        )
    device = torch.device("cuda", 0) if name == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def describe(device: torch.device) -> str:
    """Return the device and the versions of the libraries that compute, on one line."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name} ({properties.total_memory / GIB:.0f} GiB)"
        software = [f"CUDA {torch.version.cuda}", f"triton {_version('triton')}"]
    else:
        name = f"CPU ({_processor()}, {torch.get_num_threads()} threads)"
        software = []
    software = [f"torch {torch.__version__}", *software, f"Python {platform.python_version()}"]
    return f"{name}; " + ", ".join([*software, f"transformers {_version('transformers')}"])


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table whose columns after the first are numbers, aligned right."""
    lines = [list(columns), ["---", *["---:"] * (len(columns) - 1)], *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def synchronize(device: torch.device) -> None:
    """Wait for all work that was started on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Return the seconds of each of `repeats` calls, by CUDA events or by the host's clock.

    The calls are queued without waiting in between, so the time to launch them does not count on a
    GPU.
    """
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(repeats):
            run()
            marks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def phrase(error: BaseException) -> str:
    """Return the error's type and first line, fit for a table."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:160]}".replace("|", "/")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line for line in lines if line.startswith("model name"))
        return f"{name.partition(':')[2].strip()}, {os.cpu_count()} cores"
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
