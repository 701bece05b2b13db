"""`heartbeat.json` in the run directory: how far a run has come and when it last reported.

Rank 0 writes the file, and probes of a cluster read it through `gridformer health`. Both sides are
in this file. Nothing here imports torch, so that a probe takes a fraction of a second.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

from gridformer.train.callbacks import Callback, State
from gridformer.utils.files import UnreadableError, read_json

HEARTBEAT = "heartbeat.json"
# States after which the file is not written again.
_ENDED = ("stopped", "failed", "done")
_EVERY_S = 1.0  # steps may be much shorter, and the folder may be on a network
_DEFAULT_MAX_AGE_S = 600.0


class Heartbeat(Callback):
    """Writes `heartbeat.json`: a change of state at once, a further step at most once a second.

    The run goes on if the file cannot be written, for example because the disk is full: `gridformer
    health` then finds it too old.
    """

    def __init__(
        self, run_dir: Path, max_age_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = run_dir / HEARTBEAT
        self._clock = clock
        self._told: dict[str, Any] = {
            "state": "starting",
            "step": 0,
            "loss": None,
            "time": 0.0,
            "max_age_s": max_age_s,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        self._written = -math.inf

    def on_state(self, state: State, step: int | None = None, loss: float | None = None) -> None:
        now, changed = self._clock(), state != self._told["state"]
        self._told |= {"state": state, "time": now}
        if step is not None:
            self._told["step"] = step
        if loss is not None:
            self._told["loss"] = loss if math.isfinite(loss) else None  # JSON has no NaN
        if changed or now - self._written >= _EVERY_S:
            self._written = now
            unfinished = self.path.with_name(f".{HEARTBEAT}.unfinished")
            with suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                unfinished.write_text(json.dumps(self._told) + "\n", encoding="utf-8")
                os.replace(unfinished, self.path)


class Health(NamedTuple):
    """Whether a run is healthy, and a sentence that says why."""

    ok: bool
    why: str


def health_of(run_dir: Path, max_age_s: float | None = None, now: float | None = None) -> Health:
    """Judges a run by its heartbeat.

    A run is healthy if it is done, or if its last heartbeat is recent and its process is not known
    to be gone.

    Args:
        run_dir: The run directory.
        max_age_s: The oldest heartbeat of a healthy run in seconds; None means what the run itself
            wrote, which is its train.timeout_s.
        now: Seconds since 1970; None means the present.
    """
    try:
        told = read_json(run_dir / HEARTBEAT)
        state, step = told["state"], int(told["step"])
        age = max(0.0, (time.time() if now is None else now) - float(told["time"]))
        limit = float(told.get("max_age_s", _DEFAULT_MAX_AGE_S)) if max_age_s is None else max_age_s
        pid, host = int(told["pid"]), told["host"]
    except UnreadableError as error:
        return Health(False, f"{run_dir}: no heartbeat can be read: {error.reason}")
    except (ValueError, OverflowError, TypeError, KeyError, AttributeError, RecursionError):
        return Health(False, f"{run_dir / HEARTBEAT} is damaged")
    if state not in get_args(State):
        return Health(False, f"{run_dir / HEARTBEAT} is damaged")
    loss = told.get("loss")
    at = f"step {step}" + (f", loss {loss:.4g}" if isinstance(loss, float) else "")
    said = f"{run_dir}: {state}, {at}, {age:.0f} s ago"
    if state in _ENDED:
        return Health(state == "done", said)
    if host == socket.gethostname() and _is_gone(pid):
        return Health(False, f"{said}, but process {pid} has ended without a word")
    if age > limit:
        return Health(False, f"{said}, which is more than {limit:g} s")
    return Health(True, said)


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return False
