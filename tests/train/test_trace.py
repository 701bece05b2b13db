"""A step's timeline: passes, collectives with axis and bytes, in the format of a Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gridformer.comm import Record, record_messages
from gridformer.parallel.pipeline import Event
from gridformer.train.trace import merged_trace
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import plan_of, train


def part(host: str, zero: float, events: list[Event], messages: list[dict[str, Any]]) -> Any:
    return {"host": host, "zero": zero, "place": {}, "events": events, "messages": messages}


def of_kind(trace: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if all(e.get(k) == v for k, v in wanted.items())]


@pytest.mark.parametrize(("host", "start"), [("a", 1_000_000.0), ("b", 0.0)])
def test_clocks_of_one_machine_are_one(host: str, start: float) -> None:
    """Another machine's clock starts at the barrier."""
    event = Event("forward", 0, 2, 11.0, 11.5)
    trace = merged_trace([part("a", 10.0, [event], []), part(host, 11.0, [event], [])])
    first, second = of_kind(trace, name="forward 2")
    assert {first["pid"], second["pid"]} == {0, 1}
    ranked = {e["pid"]: e for e in (first, second)}
    assert ranked[0]["ts"] == 1_000_000.0
    assert ranked[1]["ts"] == start
    assert ranked[1]["dur"] == 500_000.0


def traced(plan: Any) -> dict[str, float]:
    """Return what this rank sent over each axis in the traced step, by the recorder."""
    seen: list[Record] = []
    with record_messages() as recorder:
        train(plan)
    times = [r for r in recorder.records if r.timing.ended]
    assert all(r.timing.began <= r.timing.waited <= r.timing.ended for r in times)
    seen += times
    return {axis: sum(r.bytes for r in seen if r.axis == axis) for axis in {r.axis for r in seen}}


@pytest.mark.parametrize(
    "layout",
    [
        {"scheme": "optimus", "rows": 2, "cols": 1, "pp": 2, "micro_batches": 3},
        {"scheme": "megatron", "cols": 2, "dp": 2, "dp_mode": "zero1"},
    ],
    ids=["pipeline", "replicas"],
)
def test_a_step_of_all_processes(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    plan = plan_of(token_folder, tmp_path, layout, steps=2, trace_step=2, eval_batches=1)
    sent = pool.run(4, traced, plan)
    trace = json.loads((tmp_path / "trace-step-2.json").read_text())
    assert not [*tmp_path.glob(".trace*")], "parts are gone"
    m, pp = layout.get("micro_batches", 1), layout.get("pp", 1)
    for rank in range(4):
        passes = of_kind(trace, ph="X", cat="pass", pid=rank)
        assert sorted(e["name"] for e in passes) == sorted(
            f"{kind} {i}" for kind in ("forward", "backward") for i in range(m)
        )
        assert {e["args"]["stage"] for e in passes} == ({rank // 2} if pp > 1 else {0})
        assert {e["name"] for e in of_kind(trace, ph="X", cat="other", pid=rank)} >= {
            "update",
            "wait for data",
        }
        began, ended = ({e["id"]: e for e in of_kind(trace, ph=ph, pid=rank)} for ph in ("b", "e"))
        assert began
        assert began.keys() == ended.keys()
        assert all(began[i]["ts"] <= ended[i]["ts"] for i in began)
        axes = {e["args"]["axis"] for e in began.values()}
        assert axes >= ({"row", "pp", "world"} if pp > 1 else {"col", "dp", "world"})
        for axis in axes - {"world"}:
            there = sum(e["args"]["bytes"] for e in began.values() if e["args"]["axis"] == axis)
            least = 0 if axis == "grid" else 1  # a rank in the owner's place receives nothing
            assert least <= there <= sent[rank][axis] / 2, "one of two steps"
    assert all(e["ts"] >= -1e6 and e.get("dur", 0) >= 0 for e in trace["traceEvents"] if "ts" in e)


def test_other_steps_are_not_traced(pool: WorkerPool, token_folder: Path, tmp_path: Path) -> None:
    pool.run(1, train, plan_of(token_folder, tmp_path, {}, steps=1, eval_batches=1))
    assert not [*tmp_path.glob("trace*")]
    assert not dist.is_initialized()
