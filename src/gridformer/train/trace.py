"""Records one step of all processes as a timeline for Perfetto or Chrome's trace viewer.

`train.trace_step=N` writes step N to RUNDIR/trace-step-N.json: what each process computed, how many
bytes it sent over which axis, and when it waited. Open the file in ui.perfetto.dev.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gridformer import comm
from gridformer.comm import Record, Recorder
from gridformer.mesh import Axes
from gridformer.parallel.pipeline import Clock, Event, OnAction, idle_fraction
from gridformer.parallel.pipeline.schedules import PASSES
from gridformer.utils.files import writing


class StepTrace:
    """One step as one process sees it. All processes call `record` together, then `write`."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.events: list[Event] = []
        self.recorder = Recorder()
        self.clock: Clock | None = None

    @contextmanager
    def record(self) -> Iterator[OnAction]:
        """Records messages inside the context, and the actions passed to the yielded function."""
        comm.barrier((self.axes.world,))
        if self.axes.device_type == "cuda":
            torch.cuda.synchronize()  # no message is under way that waits for this process
        self.clock = Clock(torch.device(self.axes.device_type))
        with comm.record_messages() as self.recorder:
            yield self.events.append

    def write(self, path: Path) -> float | None:
        """Writes the timelines of all processes into one file, which must be on shared storage.

        Returns:
            On rank 0, the time that pipeline ranks waited divided by the time that they computed;
            None on other ranks.
        """
        world = self.axes.world
        files = [path.with_name(f".{path.name}.{rank}") for rank in range(world.size)]
        _write(files[world.index], json.dumps(self._part()))
        comm.barrier((world,))
        if world.index:
            return None
        parts = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        _write(path, json.dumps(merged_trace(parts)))
        for file in files:
            file.unlink()
        return idle_fraction([[Event(*event) for event in part["events"]] for part in parts])

    def _part(self) -> dict[str, Any]:
        axes, clock = self.axes, self.clock
        assert clock is not None, "nothing was recorded"
        places = {name: axes[name] for name in ("pp", "dp", "row", "col", "branch")}
        return {
            "host": socket.gethostname(),
            "zero": clock.zero,
            "place": {name: axis.index for name, axis in places.items() if axis.size > 1},
            "events": [clock.told(event) for event in self.events],
            "messages": [_message(record) for record in self.recorder.records],
        }


def _write(path: Path, text: str) -> None:
    with writing(path, len(text)):
        path.write_text(text, encoding="utf-8")


def merged_trace(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the parts of all ranks, in order of rank, into one Chrome trace.

    Times are microseconds since the start of the step. Processes on one machine share a clock; on
    several machines each process counts from the barrier before the step.
    """
    one_clock = len({part["host"] for part in parts}) == 1
    events: list[dict[str, Any]] = []
    for rank, part in enumerate(parts):
        zero = parts[0]["zero"] if one_clock else part["zero"]
        place = ", ".join(f"{name} {index}" for name, index in part["place"].items())
        title = f"rank {rank}" + (f" ({place})" if place else "")
        events += [
            _meta("process_name", rank, {"name": title}),
            _meta("process_sort_index", rank, {"sort_index": rank}),
            _meta("thread_name", rank, {"name": "computes, and waits"}),
        ]
        events += [_pass(rank, zero, Event(*event)) for event in part["events"]]
        for number, message in enumerate(part["messages"]):
            events += _traveling(rank, zero, f"{rank}.{number}", message)
    events.sort(key=lambda event: (event.get("ts", -1.0), -event.get("dur", 0.0)))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _message(record: Record) -> dict[str, Any]:
    timing = record.timing
    return {
        "op": record.op,
        "axis": record.axis,
        "ranks": record.size,
        "bytes": record.bytes,
        "label": record.label,
        "times": [timing.began, timing.waited, timing.ended],
    }


def _pass(rank: int, zero: float, event: Event) -> dict[str, Any]:
    name, args = event.kind, {}
    if event.stage >= 0:
        name = f"{event.kind} {event.micro}"
        args = {"stage": event.stage, "micro-batch": event.micro}
    kind = "pass" if event.kind in PASSES else "other"
    return _slice(rank, name, kind, zero, event.span, args)


def _traveling(
    rank: int, zero: float, number: str, message: dict[str, Any]
) -> list[dict[str, Any]]:
    """Returns events for a collective on its axis's track and for the wait among the passes."""
    began, waited, ended = message["times"]
    if not ended:  # this process did not wait for it within the step
        return []
    args = {key: message[key] for key in ("axis", "ranks", "bytes", "label")}
    axis, label = message["axis"], message["label"]
    name = f"{axis}: {message['op']}" + (f", {label}" if label else "")
    travels = {"name": name, "cat": f"comm {axis}", "pid": rank, "tid": 0, "id": number}
    return [
        {"ph": "b", "ts": 1e6 * (began - zero), "args": args, **travels},
        {"ph": "e", "ts": 1e6 * (ended - zero), **travels},
        _slice(rank, f"wait for {name}", "wait", zero, (waited, ended), args),
    ]


def _slice(
    rank: int, name: str, kind: str, zero: float, span: tuple[float, float], args: dict[str, Any]
) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": 0}
    return {**event, "ts": 1e6 * (span[0] - zero), "dur": 1e6 * (span[1] - span[0]), "args": args}


def _meta(name: str, rank: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": 0, "args": args}
