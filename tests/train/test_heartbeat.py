"""heartbeat.json: what a run writes, and what `gridformer health` makes of it."""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from gridformer.train.heartbeat import HEARTBEAT, Heartbeat, health_of
from tests.support.commands import gridformer_here

NOW = 1_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def read(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / HEARTBEAT).read_text())
    return told


def test_steps_are_written_once_a_second_and_states_at_once(tmp_path: Path) -> None:
    clock, out = Clock(), tmp_path / "run"
    heart = Heartbeat(out, 60.0, clock)
    heart.on_state("starting", 4)
    assert read(out)["state"] == "starting"
    heart.on_state("training", 5, 2.5)
    assert read(out) == {
        "state": "training", "step": 5, "loss": 2.5, "time": NOW, "max_age_s": 60.0,
        "pid": os.getpid(), "host": socket.gethostname(),
    }  # fmt: skip
    clock.now += 0.5
    heart.on_state("training", 6, 2.25)
    assert read(out)["step"] == 5
    heart.on_state("saving")
    assert (read(out)["step"], read(out)["loss"], read(out)["time"]) == (6, 2.25, NOW + 0.5)
    clock.now += 1.5
    heart.on_state("training", 7, math.nan)
    heart.on_state("training", 8, 2.0)
    assert (read(out)["step"], read(out)["loss"]) == (7, None)
    assert [path.name for path in out.iterdir()] == [HEARTBEAT]


def test_a_heartbeat_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    Heartbeat(tmp_path / "file", 60.0).on_state("training", 1, 1.0)


def beat(folder: Path, **changed: Any) -> None:
    heart = Heartbeat(folder, 60.0, Clock())
    heart.on_state("training", 7, 2.0)
    (folder / HEARTBEAT).write_text(json.dumps(read(folder) | changed))


@pytest.mark.parametrize(
    ("changed", "age", "max_age_s", "ok", "why"),
    [
        ({}, 59.0, None, True, "training, step 7, loss 2, 59 s ago"),
        ({}, 61.0, None, False, "which is more than 60 s"),
        ({}, 61.0, 100.0, True, "61 s ago"),
        ({}, 30.0, 20.0, False, "which is more than 20 s"),
        ({"state": "saving", "loss": None}, 30.0, None, True, "saving, step 7, 30 s ago"),
        ({"state": "done"}, 1e6, None, True, "done, step 7"),
        ({"state": "stopped"}, 0.0, None, False, "stopped, step 7"),
        ({"state": "failed"}, 0.0, None, False, "failed, step 7"),
        ({"pid": 2**22 + 1}, 0.0, None, False, f"process {2**22 + 1} has ended without a word"),
        ({"pid": 2**22 + 1, "host": "another"}, 0.0, None, True, "0 s ago"),
        ({"state": "sleeping"}, 0.0, None, False, "is damaged"),
        ({"time": "now"}, 0.0, None, False, "is damaged"),
    ],
)
def test_health(
    changed: dict[str, Any],
    age: float,
    max_age_s: float | None,
    ok: bool,
    why: str,
    tmp_path: Path,
) -> None:
    beat(tmp_path, **changed)
    found = health_of(tmp_path, max_age_s, NOW + age)
    assert found.ok == ok
    assert why in found.why


@pytest.mark.parametrize("text", ["", "[]", "7", '{"state": "done"}', "[" * 100_000])
def test_damaged_heartbeats(text: str, tmp_path: Path) -> None:
    (tmp_path / HEARTBEAT).write_text(text)
    assert not health_of(tmp_path).ok


def test_the_command(tmp_path: Path) -> None:
    done = gridformer_here("health", str(tmp_path))
    assert (done.returncode, done.stdout.count("\n")) == (1, 1)
    assert "no heartbeat can be read" in done.stdout
    beat(tmp_path, state="done")
    done = gridformer_here("health", str(tmp_path))
    assert (done.returncode, done.stdout.count("\n")) == (0, 1)
