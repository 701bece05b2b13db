"""A run on GPUs whose messages do not fit together is refused before it starts."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

import gridformer.check
from gridformer.check import Problem, Report, report
from gridformer.config import RunConfig
from gridformer.launch.plan import plan_checked, preflight_problems
from gridformer.memory import room
from gridformer.memory.room import Room
from gridformer.parallel.auto.decisions import decide_run
from gridformer.record import Place
from gridformer.utils.errors import ConfigError
from tests.support.checking import one_group_for_all_messages, traced_here
from tests.support.fake_gpu import InProcess
from tests.support.multirank.memory import a_run

HERE = Place("parallel/pipeline/executor.py", 7, "_receive")


def problem(kind: str) -> Problem:
    return Problem(kind, (0, 1), HERE, "rank 0 waits", "use another layout", "pp")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Pretend that there are GPUs and that a check finds one problem of some kinds."""
    calls: list[dict[str, Any]] = []

    def check_step(run: RunConfig, decisions: Any, **how: Any) -> Report:
        calls.append(how)
        found = [problem(kind) for kind in ("deadlock", "read-back", "error", "untraced")]
        return Report(found, [0, 1], 2, 10)

    monkeypatch.setattr(gridformer.check, "check_step", check_step)
    monkeypatch.setattr(room, "on_gpu", lambda run: True)
    return calls


def found(layout: dict[str, Any], told: list[str] | None = None) -> list[str]:
    """Return why a run is refused, and add what is told besides."""
    run = a_run(layout, {"n_layers": 2}, {})
    said: list[str] = []
    problems = preflight_problems(run, lambda text, _: said.append(text), decide_run(run))
    if told is not None:
        told += [text for text in said if text]
    return problems


def test_what_cannot_work_is_refused_and_an_error_is_told(asked: list[dict[str, Any]]) -> None:
    told: list[str] = []
    (circle,) = found({"scheme": "megatron", "cols": 2}, told)
    (error,) = told
    assert circle.startswith("ranks wait for each other in a circle (ranks 0-1, axis pp, at par")
    assert circle.endswith("rank 0 waits; use another layout")
    assert error.startswith("the step raises an error (ranks 0-1, axis pp, at par")
    assert asked == [{"most": 0, "limit_s": 5.0}], "few ranks, for a few seconds"


def test_one_process_and_processors_are_not_checked(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found({}) == []
    monkeypatch.setattr(room, "on_gpu", lambda run: False)
    assert found({"scheme": "megatron", "cols": 2}) == []
    assert asked == []


def planned() -> list[str]:
    """Plan a pipeline on GPUs whose messages share a group; return why it is refused."""
    layout = {"pp": 4, "micro_batches": 5}
    model = {"n_layers": 4, "max_seq_len": 8}
    run = a_run(layout, model, {"global_batch": 5, "device": "cuda"})
    with patch.object(report, "trace_ranks", traced_here), one_group_for_all_messages():
        try:
            plan_checked(run, room=Room(2**50, "there is enough"))
        except ConfigError as error:
            return error.problems
    raise AssertionError("the run was not refused")


def test_a_plan_is_refused_whose_ranks_would_wait_forever(gpu: InProcess) -> None:
    (text,) = gpu(planned)
    assert text.startswith("ranks wait for each other in a circle (rank")
    assert "axis pp, at parallel/pipeline/executor.py" in text
    assert "layout.pipeline=gpipe" in text
