"""Callbacks are told what a run does, and one that fails ends neither the run nor the others."""

from __future__ import annotations

import json
import pickle
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
from gridformer.train.metrics import EVENTS_FILE
from gridformer.train.plan import Plan
from gridformer.train.trainer import Trainer
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
        ("step", 0, False),
        ("evaluation", 0, "val_loss"),
        ("step", 1, True),
        ("step", 2, True),
        ("saved", 2, True, ""),
        ("step", 3, True),
        ("evaluation", 3, "val_loss"),
        ("saved", 3, True, ""),
        ("end", "done", 3, 3, ""),
        ("close",),
    ]
    lines = [json.loads(line) for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert [(line["event"], line["step"]) for line in lines] == [
        ("start", 0),
        ("saved", 2),
        ("saved", 3),
        ("end", 3),
    ]


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


def test_what_callbacks_are_told_can_be_sent_to_other_processes() -> None:
    end = RunEnd("failed", 3, why="it broke")
    assert pickle.loads(pickle.dumps(end)) == end
