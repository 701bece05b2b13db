"""`gridformer check`: its report, its JSON and its exit codes."""

import json
from pathlib import Path

import pytest

import gridformer.check
from gridformer.check import Problem, Report
from gridformer.record import Place
from tests.support.commands import gridformer_here

TINY = ("gpt2-124m", "model.n_layers=1", "train.global_batch=2", "layout.cols=2")
SCHEME = "layout.scheme=megatron"


def test_a_run_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = gridformer_here("check", *TINY, SCHEME, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    assert found["problems"] == []
    assert found["ranks"] == found["traced"] == 2
    assert found["read_backs"] == []


@pytest.fixture
def deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("parallel/pipeline/executor.py", 7, "_receive", "layers.1")
    text = "rank 0 waits\nrank 1 waits"
    problem = Problem("deadlock", (0, 1), place, text, "use another layout", "pp", alike=3)
    report = Report([problem], [0, 1], 2, 10, {place: 2})
    monkeypatch.setattr(gridformer.check, "check_step", lambda *_, **__: report)


@pytest.mark.usefixtures("deadlock")
def test_a_problem_is_printed_and_sets_the_exit_code() -> None:
    done = gridformer_here("check", *TINY, SCHEME)
    assert done.returncode == 1
    for said in (
        "ranks wait for each other in a circle (ranks 0-1 and 3 more groups",
        "axis pp",
        "at: parallel/pipeline/executor.py:7 in _receive, module layers.1",
        "  rank 1 waits\n",
        "remedy: use another layout",
        "2 x parallel/pipeline/executor.py:7",
        "10 messages of 2 ranks: 1 problem",
    ):
        assert said in done.stdout
    done = gridformer_here("check", *TINY, SCHEME, "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert not found["ok"]
    (problem,) = found["problems"]
    assert (problem["kind"], problem["ranks"], problem["axis"]) == ("deadlock", [0, 1], "pp")
    assert (problem["file"], problem["line"]) == ("parallel/pipeline/executor.py", 7)
    assert (problem["module"], problem["groups_alike"]) == ("layers.1", 3)
