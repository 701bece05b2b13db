"""Where a run stops that is told to: all ranks stop at one point, and in time."""

import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import read_manifest, verify_checkpoint
from gridformer.config import parse_run
from gridformer.data import TokenFolder, resolve
from gridformer.mesh.process_group import World
from gridformer.parallel.auto.decisions import decide_run
from gridformer.train import stop_protocol
from gridformer.train.evaluation import Evaluator, ValidationSet
from gridformer.train.heartbeat import health_of
from gridformer.train.metrics import lacks_evaluation, read_metrics
from gridformer.train.plan import Plan
from gridformer.train.stop_protocol import StopProtocol
from gridformer.train.trainer import Trainer
from gridformer.utils import signals
from gridformer.utils.signals import MAX_HOURS, StopPolicy, StopRequest
from tests.support.multirank.pool import WorkerPool

POINTS = 7  # of a step


class Stop:
    """A stop request without signals."""

    def __init__(self, grace_s: float = 600.0) -> None:
        self.grace_s, self.cause = grace_s, ""
        self.told: list[Any] = []

    @property
    def requested(self) -> bool:
        return bool(self.cause)

    @property
    def seconds_left(self) -> float:
        return self.grace_s

    def ask(self, cause: str) -> None:
        self.cause = self.cause or cause
        for told in self.told:
            told()

    def tell(self, told: Any) -> None:
        self.told.append(told)


def run_of(one: StopProtocol, meet: threading.Barrier, pause: float) -> tuple[int, int]:
    """Take steps until the run ends; return the steps done and the points passed in the last."""
    for step in range(10_000):
        if one.begins("step", POINTS):
            return step, 0
        for number in range(POINTS):
            if number and one.stops_before(number):
                return step, number
            meet.wait(60.0)  # a collective: no rank passes it without the others
            time.sleep(pause)
        one.ended()
    raise AssertionError("the run was not told to stop")


@pytest.mark.parametrize("fits", [False, True])
@pytest.mark.parametrize("told", [[1], [0, 2], [0, 1, 2]])
def test_all_ranks_stop_at_one_point(
    told: list[int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the rest of the step fits in the grace period, it is the point after the step."""
    monkeypatch.setattr(stop_protocol, "_POLL_S", 0.01)
    monkeypatch.setattr(StopProtocol, "_rest_s", lambda self: 0.0 if fits else float("inf"))
    draw = random.Random(str(told))
    for _ in range(3):
        store, meet = dist.HashStore(), threading.Barrier(3)
        stops: list[Any] = [Stop() for _ in range(3)]
        protocols = [StopProtocol(stop, rank, 3, store) for rank, stop in enumerate(stops)]
        found: dict[int, tuple[int, int]] = {}
        pauses = [draw.uniform(0, 0.003) for _ in range(3)]

        def work(rank: int, protocols: Any, meet: Any, pauses: Any, found: Any) -> None:
            found[rank] = run_of(protocols[rank], meet, pauses[rank])
            protocols[rank].adopt_cause()

        threads = [
            threading.Thread(target=work, args=(rank, protocols, meet, pauses, found))
            for rank in range(3)
        ]
        for thread in threads:
            thread.start()
        time.sleep(draw.uniform(0.02, 0.1))
        for rank in told:
            stops[rank].ask("SIGUSR1")
        for thread in threads:
            thread.join(60.0)
        for one in protocols:
            one.close()
        assert len(found) == 3, "a rank waits for ever"
        assert len({*found.values()}) == 1, found
        assert [stop.cause for stop in stops] == ["SIGUSR1"] * 3
        if fits:
            assert found[0][1] == 0, "the step was not finished"


def test_a_rank_that_does_not_answer_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is dead. Rank 0 goes on, and would find its connection broken."""
    monkeypatch.setattr(stop_protocol, "_WAIT_S", 0.2)
    stop: Any = Stop()
    one = StopProtocol(stop, 0, 2, dist.HashStore())
    stop.ask("SIGTERM")
    assert not one.begins("step", POINTS)
    assert not any(one.stops_before(number) for number in range(1, POINTS))
    one.close()


@pytest.mark.parametrize(
    ("left_s", "save_s", "after"),
    # The step takes 100 s, of which 50 s are over at point 3.
    [(600.0, 0.0, 0), (30.0, 0.0, 3), (100.0, 60.0, 3)],
)
def test_a_step_is_finished_if_it_fits_and_the_save_after_it(
    left_s: float, save_s: float, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(stop_protocol.time, "monotonic", lambda: now[0])
    stop: Any = Stop(left_s)
    one = StopProtocol(stop, 0, 1, None, save_s=save_s)
    for step in range(2):
        assert not one.begins("step", POINTS)
        for number in range(1, POINTS):
            now[0] += 100.0 / (POINTS - 1)
            if step and number == 3:
                stop.ask("SIGTERM")
            if one.stops_before(number):
                assert number == after
                return
        one.ended()
    assert after == 0
    assert one.begins("step", POINTS)


def test_time_is_left_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 100 s end before 1,000 s are over, with 20 s for the save, and at least one does."""
    now = [0.0]
    monkeypatch.setattr(stop_protocol.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stop_protocol.time, "time", lambda: now[0])
    for ends_at, least, most in ((1000.0, 700.0, 970.0), (1.0, 100.0, 100.0)):
        now[0] = 0.0
        stop: Any = Stop()
        one = StopProtocol(stop, 0, 1, None, ends_at, save_s=20.0)
        while not one.begins("step", 1):
            now[0] += 100.0
            one.ended()
        assert least <= now[0] <= most
        assert stop.cause == MAX_HOURS


def test_points_of_an_evaluation_are_counted_over_all_sets() -> None:
    """So a run can stop within each of them."""
    passed: list[int] = []
    stopping: Any = SimpleNamespace(
        begins=lambda kind, n: passed.append(n), stops_before=passed.append, ended=lambda: None
    )

    def evaluate(reads: list[Any], answers: None) -> Any:
        for read in reads:
            read(rows)
        return SimpleNamespace(loss=1.0, losses={})

    rows = slice(0, 1)
    stepper: Any = SimpleNamespace(split=SimpleNamespace(all_rows=rows), evaluate=evaluate)
    batches: Any = SimpleNamespace(batch=lambda number, rows: {})
    sets = [ValidationSet(name, batches, range(2), None, "val") for name in ("a", "b")]
    Evaluator(stepper, sets, torch.device("cpu"))(1, stopping)
    assert passed == [4, 1, 2, 3]


def test_exit_codes() -> None:
    def code(cause: str, outcome: str, requeue: tuple[str, ...] = ("SIGTERM", "SIGUSR1")) -> int:
        stop = StopRequest.__new__(StopRequest)  # without handlers of signals
        stop.policy, stop.cause, stop._outcome = StopPolicy(requeue=requeue), cause, outcome
        return stop.exit_code

    assert code("", "done") == 0
    assert code("SIGTERM", "done") == 0
    assert [code(name, "saved") for name in ("SIGTERM", "SIGUSR1", MAX_HOURS)] == [75] * 3
    assert code("SIGINT", "saved") == 130
    assert code("SIGTERM", "saved", ()) == 143
    assert code("SIGTERM", "") == 143


STEPS = 6


def train(folder: Path, out: Path, told: int, lag: int, before: int = 2) -> tuple[int, bool]:
    """On one of two ranks, return the steps done, and whether this rank itself was told to stop.

    Rank `told` is told before step `before`.
    """
    sections: dict[str, Any] = {
        "model": {"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 16},
        "data": {"path": str(folder)},
        "layout": {"scheme": "single", "rows": 1, "cols": 1, "dp": 2},
        "train": {"steps": STEPS, "global_batch": 4, "eval_every": 0, "save_every": 0},
    }
    run = resolve(parse_run(sections), TokenFolder.open(folder))
    rank, done = dist.get_rank(), 0
    stop = signals.install(signals.StopPolicy(grace_s=600.0))
    try:
        resume = find.latest(out)
        step = read_manifest(resume).step if resume else 0
        plan = Plan(run, out, resume, step, decide_run(run))
        trainer = Trainer(
            replace(plan, unevaluated=step == STEPS and lacks_evaluation(out, STEPS)),
            World(rank, rank, 2, torch.device("cpu"), "gloo", ""),
        )
        trainer.max_in_flight = lag
        start = trainer._start

        def told_before(step: int) -> None:
            nonlocal done
            if step == before and rank == told:
                os.kill(os.getpid(), signal.SIGTERM)
                while not stop.requested:
                    time.sleep(0.001)
            done += 1
            start(step)

        trainer._start = told_before  # type: ignore[method-assign]
        trainer.fit()
        return done, stop.requested
    finally:
        stop.uninstall()


@pytest.mark.parametrize(
    ("told", "lag"), [(1, 0), (0, 1), pytest.param(0, 0, marks=pytest.mark.full)]
)
def test_all_stop_when_one_is_told_to(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, told: int, lag: int
) -> None:
    results = pool.run(2, train, token_folder, tmp_path, told, lag)
    done = 3 + lag
    assert results == [(done, told == 0), (done, told == 1)]
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert verify_checkpoint(folder).step == done


def test_the_evaluation_after_the_last_step_is_made_up_for(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """A run that was told to stop in its last step is not done before it is evaluated."""
    alone, out = tmp_path / "alone", tmp_path / "out"
    pool.run(2, train, token_folder, alone, 9, 0)
    assert ": done, step 6" in health_of(alone).why
    pool.run(2, train, token_folder, out, 1, 0, STEPS - 1)
    assert ": stopped" in health_of(out).why
    assert lacks_evaluation(out, STEPS)
    assert pool.run(2, train, token_folder, out, 9, 0) == [(0, False)] * 2
    assert ": done, step 6" in health_of(out).why
    assert not lacks_evaluation(out, STEPS)
    assert read_metrics(out)[-1]["val_loss"] == read_metrics(alone)[-1]["val_loss"]
    assert read_metrics(out)[-1]["tokens"] == read_metrics(alone)[-1]["tokens"]
