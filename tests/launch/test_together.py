"""Ranks that torchrun or srun started plan together: rank 0 does the work, once, and all know it.

The ranks are threads that meet in one store.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock, Thread, current_thread
from typing import Any

import pytest
import torch.distributed as dist

from gridformer.config import RunConfig
from gridformer.launch import plan as planning
from gridformer.launch import run as execution
from gridformer.launch.plan import plan_together
from gridformer.launch.run_lock import Holder, RunLock
from gridformer.memory import room
from gridformer.memory.room import Room
from gridformer.mesh import rendezvous
from gridformer.mesh.launch_env import RankEnv
from gridformer.parallel.auto.decisions import decide_run
from gridformer.train.plan import Plan
from gridformer.utils.errors import ConfigError
from tests.support.multirank.memory import a_run

SIZE, ON_A_MACHINE = 6, 2


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous, "store_of", lambda place: store)
    monkeypatch.setattr(planning, "_LINGER_S", 0.0)
    return Ranks(monkeypatch)


class Ranks:
    """Ranks on machines of two, which count what each of them does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: Counter[str] = Counter()
        self.rooms: list[Room | None] = []
        self.lock: RunLock | None = None
        self.layout = {"scheme": "optimus", "rows": 3, "cols": 2, "devices_per_node": 2}
        self.run = a_run(self.layout, {"hidden_size": 48, "n_heads": 12}, {})
        self._lock, self.out = Lock(), Path("runs/mine")
        for module, name in ((planning, "check_run"), (planning, "plan_checked")):
            monkeypatch.setattr(module, name, self.counted(name, getattr(self, name)))
        monkeypatch.setattr(planning, "check_devices", self.counted("devices", lambda *_: []))
        monkeypatch.setattr(room, "room_of", self.counted("room_of", self.room_of))

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self._lock:
                self.done[name] += 1
                return function(*args)

        return call

    def check_run(self, *_: Any) -> RunConfig:
        return self.run

    def plan_checked(
        self, run: RunConfig, out: Path, tell: None, room: Room | None, lock: RunLock | None
    ) -> Plan:
        if lock is not None:
            lock.take(out)
        self.rooms.append(room)
        return Plan(run, out, out / "checkpoints" / "step-3", 3, decide_run(run))

    def room_of(self, run: RunConfig) -> Room:
        assert run == self.run
        return Room(100 - self.done["room_of"], f"machine {self.done['room_of']}")

    def plan(self) -> list[Any]:
        """Return what each rank gets: its plan, or what it raises."""
        with ThreadPoolExecutor(SIZE) as threads:
            return [*threads.map(self._one, range(SIZE))]

    def _one(self, rank: int) -> Any:
        here = rank % ON_A_MACHINE
        place = RankEnv(rank, SIZE, here, ON_A_MACHINE, "torchrun", "10.0.0.1", 29500)
        try:
            return plan_together(place, "mine.yaml", (), None, self.out, None, self.lock)
        except (Exception, SystemExit) as error:
            return error


def test_rank_0_alone_plans(ranks: Ranks) -> None:
    """Each machine's memory is looked at once, and the smallest counts."""
    first, *rest = ranks.plan()
    assert isinstance(first, Plan)
    assert first.decisions.block is not None
    assert rest == [first] * (SIZE - 1)
    assert ranks.done == {"check_run": 1, "plan_checked": 1, "devices": SIZE, "room_of": 3}
    assert ranks.rooms == [Room(97, "machine 3")]


class CountingStore:
    """Counts what each thread, which plays a rank, asks of a store, but not how often it looks."""

    def __init__(self) -> None:
        self.store, self.asked = dist.HashStore(), Counter[str]()

    def __getattr__(self, name: str) -> Any:
        if name in ("set", "get", "add"):
            self.asked[current_thread().name] += 1
        return getattr(self.store, name)


@pytest.mark.parametrize("size", [6, 48])
def test_what_a_rank_asks_of_the_store_does_not_grow(
    monkeypatch: pytest.MonkeyPatch, ranks: Ranks, size: int
) -> None:
    store = CountingStore()
    monkeypatch.setattr(rendezvous, "store_of", lambda place: store)

    def plan(rank: int) -> None:
        place = RankEnv(rank, size, rank % 2, 2, "torchrun", "10.0.0.1", 29500)
        plan_together(place, "mine.yaml", (), None, Path("runs/mine"))

    threads = [Thread(target=plan, args=(rank,), name=str(rank)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    # A rank reads config, folder and plan, says so of each, and says what its machine is like.
    # Whoever hears of one of them last says so, too: it may be the same rank. Rank 0 reads what all
    # say.
    asked = [store.asked[str(rank)] for rank in range(1, size)]
    assert min(asked) == 7
    assert sum(asked) == 7 * (size - 1) + 3
    assert store.asked["0"] == 4 + size


@pytest.mark.parametrize(
    ("where", "error", "code"),
    [
        ("check_run", ConfigError("first", "second"), 2),
        ("plan_checked", ConfigError("it does not fit"), 2),
        ("plan_checked", ValueError("a mistake of ours"), 1),
    ],
    ids=["config", "memory", "mistake"],
)
def test_rank_0_alone_refuses(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception, code: int
) -> None:
    """The others end silently with the same exit code."""

    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(planning, where, refuse)
    first, *rest = ranks.plan()
    assert first is error
    assert all(isinstance(other, SystemExit) and other.code == code for other in rest), rest


def test_a_machine_with_too_few_gpus_is_refused(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def machine(run: RunConfig, place: RankEnv) -> str:
        return json.dumps({"problems": ["no GPU"] * (place.rank > 3), "gpu": "[]"})

    monkeypatch.setattr(planning, "_machine", machine)
    first, *rest = ranks.plan()
    assert isinstance(first, ConfigError)
    assert first.problems == ["no GPU"], "once, although two ranks say it"
    assert all(isinstance(other, SystemExit) for other in rest)


@pytest.mark.parametrize("apart", [False, True])
def test_machines_that_do_not_share_the_run_directory_are_refused(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, apart: bool
) -> None:
    """Rank 0 names them. Each looks for the lock that rank 0 holds."""
    monkeypatch.setattr(planning, "_SEEN_S", 0.2)
    ranks.out, seen = tmp_path / "mine", planning.holder_of
    looked: list[Path] = []

    def elsewhere(out: Path) -> Holder | None:
        looked.append(out)
        return seen(out / "elsewhere" if apart else out)

    monkeypatch.setattr(planning, "holder_of", elsewhere)
    with RunLock() as ranks.lock:
        first, *rest = ranks.plan()
    assert set(looked) == {ranks.out}
    if not apart:
        assert len(looked) == SIZE // ON_A_MACHINE - 1, "the first rank of each other machine"
        assert all(isinstance(plan, Plan) for plan in (first, *rest))
        return
    assert isinstance(first, ConfigError)
    (problem,) = first.problems
    assert f"{ranks.out} is not the same folder on {socket.gethostname()}" in problem
    assert all(isinstance(other, SystemExit) and other.code == 2 for other in rest), rest


def test_rank_0_alone_says_that_a_run_is_done(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(ranks.run, Path("runs/mine"), None, ranks.run.train.steps, decide_run(ranks.run))
    for rank in range(2):
        place = RankEnv(rank, 2, rank, 2, "torchrun", "10.0.0.1", 29500)
        monkeypatch.setattr(execution, "rank_env", lambda place=place: place)
        execution.execute(plan)
        assert capsys.readouterr().out.count("has done") == (rank == 0)
