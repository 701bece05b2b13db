"""Reads what a run has left in its run directory. Nothing in there is trusted to be as it should.

A report is read while a run goes on, after it has failed, and from folders that others have sent.
So every file may be missing, cut off or wrong, and what cannot be read is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gridformer.checkpoint import find
from gridformer.checkpoint.elsewhere import url_of
from gridformer.config import RunConfig, load_run
from gridformer.train.events import EVENTS_FILE
from gridformer.train.heartbeat import HEARTBEAT
from gridformer.train.metrics import METRICS
from gridformer.utils.errors import UserError
from gridformer.utils.files import read_bytes
from gridformer.utils.units import GIB

SAMPLES = "samples.jsonl"
CONFIG = "config.yaml"
_MOST_BYTES = GIB  # of a file of lines: a million steps have a third of that
_MOST_SAMPLES = 40  # the last ones
_LONGEST = 4000  # characters of a text that is shown


@dataclass(frozen=True)
class Sample:
    """Text that a model has generated.

    Attributes:
        step: The step of the model; None if it is not known.
        prompt: What it was given.
        text: What it has generated.
        reference: What it should have generated; empty if there is nothing.
    """

    step: int | None
    prompt: str
    text: str
    reference: str = ""


@dataclass(frozen=True)
class RunReading:
    """What a run directory tells.

    Attributes:
        label: The folder as it was named on the command line, or a part of that.
        folder: The folder.
        config: The run's config; None if it cannot be read.
        problem: Why there is no config; empty if there is one.
        settings: All settings by dotted key, such as `train.lr`.
        metrics: Its lines of metrics.jsonl, by step.
        events: Its lines of events.jsonl, oldest first.
        state: What the heartbeat says, such as `done`; empty if there is none.
        checkpoints: The steps of its complete checkpoints.
        traces: The files with timelines of steps.
        samples: Text that it has generated, oldest first.
    """

    label: str
    folder: Path
    config: RunConfig | None
    problem: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    state: str = ""
    checkpoints: list[int] = field(default_factory=list)
    traces: list[Path] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The last step that has metrics; 0 if there is none."""
        return self.metrics[-1]["step"] if self.metrics else 0

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Returns the steps at which a metric is known, and its values there."""
        found = [(m["step"], m[key]) for m in self.metrics if _is_number(m.get(key))]
        return [step for step, _ in found], [float(value) for _, value in found]

    @property
    def names(self) -> list[str]:
        """The names of all metrics that are numbers, in the order of their appearance."""
        found = {key: None for line in self.metrics for key in line if _is_number(line[key])}
        return [key for key in found if key != "step"]


def read_runs(folders: Sequence[Path]) -> list[RunReading]:
    """Reads some run directories.

    Args:
        folders: The run directories, as they were named by the user.

    Raises:
        UserError: A folder is no run directory.
    """
    problems = [problem for folder in folders if (problem := _problem(folder))]
    if problems:
        raise UserError("\n".join(problems))
    return [_read(folder, label) for folder, label in zip(folders, short_labels(folders))]


def short_labels(folders: Sequence[Path]) -> list[str]:
    """Returns a short label for each folder: as many of its last parts as make them all differ."""
    parts = [folder.parts or (str(folder),) for folder in folders]
    for n in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-n:]) for part in parts]
        if len({*found}) == len(found):
            return found
    return [f"{number}. {'/'.join(part)}" for number, part in enumerate(parts, start=1)]


def _problem(folder: Path) -> str:
    if url := url_of(folder):
        return f"{url} has checkpoints at most, and a report reads metrics: name the run directory"
    if not folder.is_dir():
        return f"{folder} is no folder: name a run directory, such as runs/demo"
    if (folder / METRICS).is_file() or (folder / CONFIG).is_file():
        return ""
    inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    hint = f"; {folder / inside[0]} is one" if inside else ""
    return f"{folder} has neither {METRICS} nor {CONFIG}, so it is no run directory{hint}"


def _read(folder: Path, label: str) -> RunReading:
    config, problem = None, ""
    try:
        config = load_run(folder / CONFIG)
    except (UserError, OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    settings = flat(config.model_dump(mode="json")) if config else {}
    by_step = {line["step"]: line for line in readable_lines(folder / METRICS) if _has_step(line)}
    return RunReading(
        label,
        folder,
        config,
        problem,
        settings,
        [by_step[step] for step in sorted(by_step)],
        [
            line
            for line in readable_lines(folder / EVENTS_FILE)
            if isinstance(line.get("event"), str)
        ],
        _state(folder / HEARTBEAT),
        [int(path.name.split("-")[1]) for path in find.complete(folder)],
        sorted(folder.glob("trace-step-*.json"), key=lambda path: (len(path.name), path.name)),
        [_sample(line) for line in readable_lines(folder / SAMPLES)][-_MOST_SAMPLES:],
    )


def readable_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects in a file of JSON lines, without lines that are cut off or damaged."""
    try:
        content = read_bytes(path, _MOST_BYTES)
    except UserError:
        return
    for line in content.split(b"\n"):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings by dotted key."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _has_step(line: dict[str, Any]) -> bool:
    step = line.get("step")
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is larger than any float
        return False


def _state(path: Path) -> str:
    for line in readable_lines(path):
        if isinstance(line.get("state"), str):
            return str(line["state"])[:20]
    return ""


def _sample(line: dict[str, Any]) -> Sample:
    step = line.get("step")
    texts = (str(line.get(key) or "")[:_LONGEST] for key in ("prompt", "text", "reference"))
    return Sample(step if isinstance(step, int) else None, *texts)
