"""What has happened to a run: starts, saves, steps that were not finite, and its end.

A run writes these to events.jsonl. For runs without that file, checkpoints and metrics show a part
of it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from gridformer.report.reading import RunReading
from gridformer.utils.units import format_bytes, three_digits

MarkKind = Literal["start", "save", "trouble", "end"]
_LONGEST = 400


class Mark(NamedTuple):
    """Something that happened to a run.

    Attributes:
        step: After how many steps.
        kind: What kind of thing it was.
        text: A sentence about it.
        time: When it was, in UTC; empty if that is not known.
    """

    step: int
    kind: MarkKind
    text: str
    time: str = ""


def marks_of(run: RunReading) -> list[Mark]:
    """Returns what has happened to a run, in the order in which it happened."""
    told = [mark for event in run.events if (mark := _mark(event)) is not None]
    saved = {mark.step for mark in told if mark.kind == "save"}
    found = [
        Mark(step, "save", f"Checkpoint of step {step}.")
        for step in run.checkpoints
        if step not in saved
    ]
    if not run.events:
        found += _from_metrics(run)
        return sorted(found, key=lambda mark: mark.step)
    return [*found, *told]


def starts(run: RunReading) -> int:
    """Returns how often a run was started; 0 if that is not known."""
    return sum(event["event"] == "start" for event in run.events)


def _mark(event: dict[str, Any]) -> Mark | None:
    step, kind = event.get("step"), event["event"]
    if not isinstance(step, int) or not 0 <= step < 2**53:
        return None
    made = _SENTENCES.get(kind)
    if made is None:
        return None
    mark, text = made(event, step)
    return Mark(step, mark, text[:_LONGEST], _time(event.get("time")))


def _start(event: dict[str, Any], step: int) -> tuple[MarkKind, str]:
    where = f" on {event['layout']}" if event.get("layout") else ""
    n, device = event.get("devices"), event.get("device")
    many = f" ({n} x {device})" if n and device else ""
    return "start", f"{'Resumed after' if step else 'Started at'} step {step}{where}{many}."


def _saved(event: dict[str, Any], step: int) -> tuple[MarkKind, str]:
    text = f"Checkpoint of step {step}"
    n_bytes, seconds, stalled = (_number(event.get(k)) for k in ("bytes", "seconds", "stalled_s"))
    if n_bytes is not None and seconds is not None:
        text += f": {format_bytes(n_bytes)} in {three_digits(seconds)} s"
    if stalled is not None:
        text += f"; training waited for {three_digits(stalled)} s"
    return "save", f"{text}."


def _not_saved(event: dict[str, Any], step: int) -> tuple[MarkKind, str]:
    return "trouble", f"No checkpoint of step {step} was saved: {event.get('why', '')}."


def _diverged(event: dict[str, Any], step: int) -> tuple[MarkKind, str]:
    return "trouble", f"{event.get('why') or f'Step {step} was not finite'}."


def _failed(event: dict[str, Any], step: int) -> tuple[MarkKind, str]:
    return "trouble", f"The run failed after step {step}: {event.get('why', '')}."


def _end(event: dict[str, Any], step: int) -> tuple[MarkKind, str]:
    how = "Stopped after" if event.get("stopped") else "Done with"
    return "end", f"{how} step {step}."


_SENTENCES = {
    "start": _start,
    "saved": _saved,
    "not_saved": _not_saved,
    "diverged": _diverged,
    "failed": _failed,
    "end": _end,
}


def _from_metrics(run: RunReading) -> list[Mark]:
    found, rollbacks = [], 0.0
    for line in run.metrics:
        step = line["step"]
        if isinstance(line.get("left_out"), str):
            found.append(Mark(step, "trouble", f"Step {step} was left out: {line['left_out']}."))
        now = _number(line.get("rollbacks")) or 0.0
        if now > rollbacks:
            text = f"The run went back to the checkpoint of step {step - 1}."
            found.append(Mark(step - 1, "trouble", text))
            rollbacks = now
    return found


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None  # type: ignore[arg-type]


def _time(value: object) -> str:
    seconds = _number(value)
    if seconds is None or not 0 < seconds < 4e9:
        return ""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
