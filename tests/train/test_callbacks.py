"""Callbacks are told what a run does; one that fails ends nothing; the heartbeat and health."""

import json
import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gridformer.mesh.process_group import World
from gridformer.train import Callback, RunEnd, RunStart, Saved, journal
from gridformer.train.callbacks import Callbacks
from gridformer.train.console import title_of
from gridformer.train.heartbeat import HEARTBEAT, Heartbeat, health_of
from gridformer.train.metrics import EVENTS_FILE
from gridformer.train.plan import Plan
from gridformer.train.trainer import Trainer
from tests.support.commands import gridformer_here
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import plan_of

STEPS = 3


class Told(Callback):
    """Notes everything that it is told in a list."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_start(self, start: RunStart) -> None:
        self.events.append(("start", start.step, start.layout, start.devices, start.device))

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        self.events.append(("step", metrics["step"], "loss" in metrics))

    def on_evaluation(self, step: int, results: Mapping[str, Any]) -> None:
        self.events.append(("evaluation", step, *results))

    def on_saved(self, saved: Saved) -> None:
        self.events.append(("saved", saved.step, saved.n_bytes > 0, saved.failure))

    def on_end(self, end: RunEnd) -> None:
        self.events.append(("end", end.how, end.step, end.saved, end.why))

    def close(self) -> None:
        self.events.append(("close",))


class Fails(Callback):
    """Fails after its first step, and must get no more events."""

    def __init__(self) -> None:
        self.calls = 0

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        metrics.clear()  # type: ignore[attr-defined] # others have metrics of their own
        self.calls += 1
        raise KeyError("no such thing")

    def close(self) -> None:
        self.calls += 100


def trained(plan: Plan, stops_at: int = -1) -> tuple[list[tuple[Any, ...]], int]:
    """Train on one rank; return what a callback was told, and the calls of one that fails."""
    told, fails = Told(), Fails()
    trainer = Trainer(
        plan, World(0, 0, 1, torch.device("cpu"), "gloo", "test"), callbacks=[fails, told]
    )
    start = trainer._start

    def breaks(step: int) -> None:
        if step == stops_at:
            raise OSError("the data are gone")
        start(step)

    with patch.object(trainer, "_start", breaks), patch.object(journal, "plot_loss") as plot:
        try:
            trainer.fit()
            plot.assert_called_once_with(plan.out, title_of(plan.run), plan.run)
        except OSError:
            assert stops_at >= 0
    return told.events, fails.calls


def test_a_run_tells_its_callbacks_and_outlives_one_that_fails(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"steps": STEPS, "save_every": 2, "async_save": False}
    plan = plan_of(token_folder, tmp_path, {"micro_batches": 2}, **settings)
    (((events, failed)),) = pool.run(1, trained, plan)
    assert failed == 1
    assert events == [
        ("start", 0, "single device", 1, "cpu"),
        *(("step", 0, False), ("evaluation", 0, "val_loss")),
        *(("step", 1, True), ("step", 2, True), ("saved", 2, True, "")),
        *(("step", 3, True), ("evaluation", 3, "val_loss"), ("saved", 3, True, "")),
        *(("end", "done", 3, 3, ""), ("close",)),
    ]
    lines = [json.loads(line) for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    written = [(line["event"], line["step"]) for line in lines]
    assert written == [("start", 0), ("saved", 2), ("saved", 3), ("end", 3)]


def test_callbacks_hear_of_a_run_that_fails(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    plan = plan_of(token_folder, tmp_path, {"micro_batches": 2}, steps=STEPS)
    (((events, _)),) = pool.run(1, trained, plan, 2)
    assert events[-2:] == [("end", "failed", 2, None, "OSError: the data are gone"), ("close",)]


def test_the_sentence_names_the_callback_and_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Console(Told):
        def on_note(self, sentence: str) -> None:
            self.events.append((sentence,))

    console, fails = Console(), Fails()
    callbacks = Callbacks([console], [fails])
    for _ in range(2):
        callbacks.tell(lambda callback: callback.on_step({"step": 1}))
    [said] = [event[0] for event in console.events if len(event) == 1]
    assert said.startswith(
        "the callback Fails has failed (KeyError: 'no such thing', in test_callbacks.py, line "
    )
    assert said.endswith("it gets no more events, and the run goes on")
    assert len(console.events) == 3
    assert callbacks.others == []


def test_errors_of_what_a_run_needs_end_it_after_all_are_closed() -> None:
    class Full(Told):
        def close(self) -> None:
            raise OSError("the disk is full")

    told = Told()
    callbacks = Callbacks([Full(), told], [])
    with pytest.raises(OSError, match="the disk is full"):
        callbacks.close()
    assert told.events == [("close",)]


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
    changed: dict[str, Any], age: float, max_age_s: float | None, ok: bool, why: str, tmp_path: Path
) -> None:
    beat(tmp_path, **changed)
    found = health_of(tmp_path, max_age_s, NOW + age)
    assert found.ok == ok
    assert why in found.why


@pytest.mark.parametrize("text", ["", "[]", "7", '{"state": 1, "step": Infinity}', "[" * 100_000])
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
