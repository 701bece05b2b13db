"""A run on GPUs whose messages do not fit together is refused before it starts."""

from __future__ import annotations

from typing import Any

import pytest

import gridformer.check
from gridformer.check import Problem, Report
from gridformer.config import RunConfig
from gridformer.launch.preflight import preflight_problems
from gridformer.memory import estimate
from gridformer.parallel.auto.decisions import decide_run
from gridformer.trace import Place
from tests.support.multirank.memory import a_run

HERE = Place("parallel/pipeline/executor.py", 7, "_receive")


def problem(kind: str) -> Problem:
    return Problem(kind, (0, 1), HERE, "rank 0 waits", "use another layout", "pp")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Pretend that there are GPUs and that a check finds one problem of each kind."""
    calls: list[dict[str, Any]] = []

    def check_run(run: RunConfig, decisions: Any, **how: Any) -> Report:
        calls.append(how)
        found = [problem(kind) for kind in ("deadlock", "read-back", "error")]
        return Report(found, [0, 1], 2, 10)

    monkeypatch.setattr(gridformer.check, "check_run", check_run)
    monkeypatch.setattr(estimate, "on_gpu", lambda run: True)
    return calls


def found(layout: dict[str, Any]) -> list[str]:
    run = a_run(layout, {"n_layers": 2}, {})
    return preflight_problems(run, lambda *_: None, decide_run(run))


def test_what_cannot_work_is_refused(asked: list[dict[str, Any]]) -> None:
    (text,) = found({"scheme": "megatron", "cols": 2})
    assert text.startswith("ranks wait for each other in a circle (ranks 0-1, axis pp, at parallel")
    assert text.endswith("rank 0 waits; use another layout")
    assert asked == [{"most": 0, "limit_s": 5.0}], "few ranks, for a few seconds"


def test_one_process_and_processors_are_not_checked(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found({}) == []
    monkeypatch.setattr(estimate, "on_gpu", lambda run: False)
    assert found({"scheme": "megatron", "cols": 2}) == []
    assert asked == []
