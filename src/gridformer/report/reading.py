"""Reads what a run has left in its run directory. Nothing in there is trusted to be as it should.

A report is read while a run goes on, after it has failed, and from folders that others have sent.
So every file may be missing, cut off or wrong, and what cannot be read is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import compress
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

import yaml

from gridformer.checkpoint import find
from gridformer.checkpoint.copies import url_of
from gridformer.config import RunConfig, load_run
from gridformer.train.heartbeat import HEARTBEAT
from gridformer.train.metrics import EVENTS_FILE, METRICS, flat, is_number
from gridformer.utils.errors import UserError
from gridformer.utils.files import read_bytes
from gridformer.utils.units import GIB, format_bytes, format_value, three_digits

SAMPLES = "samples.jsonl"
CONFIG = "config.yaml"
_MOST_BYTES = GIB  # of a file of lines: a million steps have a third of that
_MOST_SAMPLES = 40  # the last ones
_LONGEST = 4000  # characters of a text that is shown
_LONGEST_MARK, _LONGEST_VALUE = 400, 200
NOT_SET = "-"
MarkKind = Literal["start", "save", "trouble", "end"]


@dataclass(frozen=True)
class Sample:
    """Text that a model has generated."""

    step: int | None  # of the model; None if it is not known
    prompt: str
    text: str
    reference: str = ""  # what it should have generated, if that is known


@dataclass(frozen=True)
class RunReading:
    """The content of a run directory."""

    label: str  # the folder as it was named on the command line, or a part of that
    folder: Path
    config: RunConfig | None  # None if it cannot be read
    problem: str = ""  # why there is no config
    settings: dict[str, Any] = field(default_factory=dict)  # by dotted key, such as `train.lr`
    changed: frozenset[str] = frozenset()  # the keys of settings that are not the defaults
    metrics: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl, by step
    events: list[dict[str, Any]] = field(default_factory=list)  # of events.jsonl, oldest first
    state: str = ""  # of the heartbeat, such as `done`
    checkpoints: list[int] = field(default_factory=list)  # the steps of complete ones
    traces: list[Path] = field(default_factory=list)  # files with timelines of steps
    samples: list[Sample] = field(default_factory=list)  # oldest first

    def where(self, step: int) -> str:
        """Returns ` on` and the layout that ran a step, or nothing if that is not known."""
        starts = [e for e in self.events if e["event"] == "start" and _is_step(e.get("step"))]
        layout = next((e.get("layout") for e in reversed(starts) if e["step"] < step), None)
        return f" on {layout[:_LONGEST_VALUE]}" if isinstance(layout, str) else ""

    @property
    def last_step(self) -> int:
        """The last step that has metrics; 0 if there is none."""
        return self.metrics[-1]["step"] if self.metrics else 0

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Returns the steps at which a metric is known, and its values there."""
        lines = [line for line in self.metrics if is_number(line.get(key))]
        return [line["step"] for line in lines], [float(line[key]) for line in lines]

    def expert_loads(self) -> tuple[list[int], list[list[float]]]:
        """Returns steps, and for each layer with experts the load of its fullest one there.

        1 is the mean load of the layer's experts.
        """
        steps, loads = [], []
        for line in self.metrics:
            shares = line.get("experts")
            if isinstance(shares, list) and shares and all(map(_are_shares, shares)):
                steps.append(line["step"])
                loads.append([max(layer) * len(layer) / sum(layer) for layer in shares])
        same = [len(layers) == len(loads[0]) for layers in loads]
        return [*compress(steps, same)], [[*layer] for layer in zip(*compress(loads, same))]

    @property
    def names(self) -> list[str]:
        """The names of all metrics that are numbers, in the order of their appearance."""
        numbers = {key: None for line in self.metrics for key in line if is_number(line[key])}
        return [key for key in numbers if key != "step"]


def read_runs(folders: Sequence[Path]) -> list[RunReading]:
    """Reads some run directories.

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
        labels = ["/".join(part[-n:]) for part in parts]
        if len({*labels}) == len(labels):
            return labels
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
    changed = flat(config.model_dump(mode="json", exclude_defaults=True)) if config else {}
    metrics = [line for line in readable_lines(folder / METRICS) if _is_step(line.get("step"))]
    by_step = {line["step"]: line for line in metrics}
    beats = [line.get("state") for line in readable_lines(folder / HEARTBEAT)]
    events = [e for e in readable_lines(folder / EVENTS_FILE) if isinstance(e.get("event"), str)]
    _put_saves(by_step, events)
    return RunReading(
        label,
        folder,
        config,
        problem,
        settings,
        frozenset(changed),
        [by_step[step] for step in sorted(by_step)],
        events,
        next((state[:20] for state in beats if isinstance(state, str)), ""),
        [int(path.name.split("-")[1]) for path in find.complete(folder)],
        sorted(folder.glob("trace-step-*.json"), key=lambda path: (len(path.name), path.name)),
        [_sample(line) for line in readable_lines(folder / SAMPLES)][-_MOST_SAMPLES:],
    )


def _put_saves(by_step: Mapping[int, dict[str, Any]], events: Sequence[dict[str, Any]]) -> None:
    """Moves the seconds of saves to the steps of their checkpoints.

    Lines of metrics have them one or more steps later, and those of the last save never.
    """
    saves = {event.get("step"): event for event in events if event["event"] == "saved"}
    for step, line in by_step.items() if saves else ():
        for key, name in (("save_s", "seconds"), ("save_stall_s", "stalled_s")):
            line.pop(key, None)
            if step in saves:
                line[key] = saves[step].get(name)


def readable_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects in a file of JSON lines, without lines that are cut off or damaged."""
    try:
        content = read_bytes(path, _MOST_BYTES)
    except UserError:
        return
    for line in content.split(b"\n"):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict):
            yield values


def _are_shares(layer: object) -> bool:
    """Returns whether these are the shares that the experts of a layer have of its tokens."""
    if not isinstance(layer, list) or not all(is_number(one) and one >= 0 for one in layer):
        return False
    return 0 < sum(layer) < 2


def _is_step(step: object) -> bool:
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53


def _sample(line: dict[str, Any]) -> Sample:
    step = line.get("step")
    texts = (str(line.get(key) or "")[:_LONGEST] for key in ("prompt", "text", "reference"))
    return Sample(step if isinstance(step, int) else None, *texts)


# --------------------------------------------------------------------------- history


class Mark(NamedTuple):
    """Something that happened to a run after some steps."""

    step: int
    kind: MarkKind
    text: str  # a sentence
    time: str = ""  # in UTC; empty if it is not known


def marks_of(run: RunReading) -> list[Mark]:
    """Returns what has happened to a run, in the order in which it happened."""
    told = [mark for event in run.events if (mark := _mark(event)) is not None]
    saved = {mark.step for mark in told if mark.kind == "save"}
    marks = [
        Mark(step, "save", f"Checkpoint of step {step}.")
        for step in run.checkpoints
        if step not in saved
    ]
    return [*marks, *told]


def _mark(event: dict[str, Any]) -> Mark | None:
    step, why = event.get("step"), event.get("why", "")
    if not _is_step(step):
        return None
    kind: MarkKind = "trouble"
    match event["event"]:
        case "start":
            kind, text = "start", _start(event)
        case "saved":
            kind, text = "save", _saved(event)
        case "not_saved":
            text = f"No checkpoint of step {step} was saved: {why}."
        case "diverged":
            text = f"{why or f'Step {step} was not finite'}."
        case "failed":
            text = f"The run failed after step {step}: {why}."
        case "end":
            how = "Stopped after" if event.get("stopped") else "Done with"
            kind, text = "end", f"{how} step {step}."
        case _:
            return None
    return Mark(event["step"], kind, text[:_LONGEST_MARK], _time(event.get("time")))


def _start(event: dict[str, Any]) -> str:
    how = "Resumed after" if event["step"] else "Started at"
    where = f" on {event['layout']}" if event.get("layout") else ""
    n, device = event.get("devices"), event.get("device")
    many = f" ({n} x {device})" if n and device else ""
    return f"{how} step {event['step']}{where}{many}."


def _saved(event: dict[str, Any]) -> str:
    text = f"Checkpoint of step {event['step']}"
    n_bytes, seconds, stalled = (_number(event.get(k)) for k in ("bytes", "seconds", "stalled_s"))
    if n_bytes is not None and seconds is not None:
        text += f": {format_bytes(n_bytes)} in {three_digits(seconds)} s"
    if stalled is not None:
        text += f"; training waited for {three_digits(stalled)} s"
    return f"{text}."


def _number(value: object) -> float | None:
    return float(value) if is_number(value) else None  # type: ignore[arg-type]


def _time(value: object) -> str:
    seconds = _number(value)
    if seconds is None or not 0 < seconds < 4e9:
        return ""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


# --------------------------------------------------------------------------- settings


def settings_table(runs: Sequence[RunReading], differing: bool) -> list[tuple[str, list[str]]]:
    """Returns rows of settings, or of those that differ: a key, and the value of each run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = []
    for key in keys:
        values = [shown(run.settings[key]) if key in run.settings else NOT_SET for run in runs]
        raw = [run.settings.get(key, NOT_SET) for run in runs]
        if not differing or any(value != raw[0] for value in raw):
            rows.append((key, values))
    return rows


def shown(value: Any) -> str:
    """Returns a value as in a run file. Of absolute paths only the last part is shown.

    A page is sent to others, and where a machine keeps its files does not concern them.
    """
    if isinstance(value, list):
        return f"[{', '.join(shown(one) for one in value)}]"[:_LONGEST_VALUE]
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {shown(one)}' for key, one in value.items())}}}"[
            :_LONGEST_VALUE
        ]
    text = "null" if value is None else format_value(value)
    if isinstance(value, str) and PurePath(text).is_absolute():
        text = f".../{PurePath(text).name}"
    return text[:_LONGEST_VALUE]
