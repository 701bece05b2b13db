"""`events.jsonl` in the run directory: when a run started, saved, diverged and ended.

metrics.jsonl has one line for each step, as if the run had never been interrupted. This file
records events and their times: a run that is resumed appends to it. `gridformer report` shows it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gridformer.train.callbacks import Callback, RunEnd, RunStart, Saved

EVENTS_FILE = "events.jsonl"


class Events(Callback):
    """Writes events.jsonl. The run goes on if it cannot be written, as on a full disk.

    Args:
        run_dir: The run directory.
        clock: Returns the time in seconds since 1970.
    """

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock = run_dir / EVENTS_FILE, clock

    def on_start(self, start: RunStart) -> None:
        about = {"layout": start.layout, "devices": start.devices, "device": start.device}
        self._write("start", start.step, about)

    def on_saved(self, saved: Saved) -> None:
        if saved.failure:
            self._write("not_saved", saved.step, {"why": saved.failure})
            return
        about = {"bytes": saved.n_bytes, "seconds": saved.seconds, "stalled_s": saved.stalled_s}
        self._write("saved", saved.step, about)

    def on_diverged(self, step: int, why: str, back_to: int | None) -> None:
        self._write("diverged", step, {"why": why, "back_to": back_to})

    def on_end(self, end: RunEnd) -> None:
        if end.how == "failed":
            self._write("failed", end.step, {"why": end.why})
        else:
            self._write("end", end.step, {"stopped": end.how == "stopped"})

    def _write(self, event: str, step: int, about: dict[str, Any]) -> None:
        line = json.dumps({"event": event, "time": self._clock(), "step": step, **about})
        with suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
