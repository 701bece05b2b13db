"""Planning a run: refusals before torch is loaded, and of messages that do not fit together."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gridformer.check
from gridformer.check import Problem, Report
from gridformer.config import RunConfig
from gridformer.launch import plan
from gridformer.launch.run_lock import is_held
from gridformer.memory import room
from gridformer.memory.room import Room
from gridformer.parallel.auto.decisions import decide_run
from gridformer.record import Place
from gridformer.train.metrics import read_metrics
from gridformer.utils.errors import ConfigError, UserError
from tests.support.commands import gridformer_here, python_alone
from tests.support.fake_gpu import InProcess
from tests.support.multirank.memory import a_run
from tests.support.multirank.nccl_path import one_group_for_all_messages

SCRIPT = """
import sys
from gridformer.cli.app import app
try:
    app(["train", "demo", "layout.cols=3"], standalone_mode=False)
except Exception as error:
    print(type(error).__name__, "torch" in sys.modules)
"""


def test_a_refusal_loads_no_torch() -> None:
    done = python_alone("-c", SCRIPT)
    assert done.stdout == "ConfigError False\n", done.stderr


@pytest.mark.parametrize("name", ["index.json", "config.json", "config.yaml"])
def test_a_run_replaces_no_files_of_others(tmp_path: Path, name: str) -> None:
    """A folder of tokens, a model of Hugging Face, and the folder of a run file."""
    plan.check_run_dir(tmp_path / "new")
    plan.check_run_dir(tmp_path)
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"has a file {name}"):
        plan.check_run_dir(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    plan.check_run_dir(tmp_path)


@pytest.mark.parametrize(
    ("name", "put"),
    [
        ("lock", os.mkfifo),
        ("metrics.jsonl", lambda path: path.symlink_to("/dev/zero")),
        ("events.jsonl", lambda path: path.symlink_to(path.name)),
        ("config.yaml", lambda path: path.symlink_to("gone")),
        ("heartbeat.json", Path.mkdir),
        ("checkpoints", os.mkfifo),
    ],
)
def test_a_run_neither_waits_for_pipes_nor_reads_devices(
    tmp_path: Path, name: str, put: Callable[[Path], object]
) -> None:
    put(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name} is no .* where a run has one: remove it"):
        plan.check_run_dir(tmp_path)


def test_readers_of_a_run_do_not_wait_for_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    assert not is_held(tmp_path)
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(
        UserError, match=r"metrics\.jsonl: cannot be read \(it is a pipe, not a file"
    ):
        read_metrics(tmp_path)


def test_a_model_that_takes_its_vocabulary_from_the_data() -> None:
    with pytest.raises(ConfigError, match=r"add model\.vocab_size"):
        plan.read_run_without_data("demo-4m")
    assert plan.read_run_without_data("demo-4m", ["model.vocab_size=300"]).model.vocab_size == 300


def test_the_length_of_a_long_context_is_assumed_for_estimates_alone(
    tmp_path: Path, token_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    assert plan.read_run_without_data("llama-3.1-8b", (), notes.append).seq_len == 8192
    assert notes == [
        "data.seq_len is not set: this is for sequences of 8,192 tokens, and llama-3.1-8b reads up "
        "to 131,072"
    ]
    notes.clear()
    for model, words, length in (
        ("llama-3.1-8b", ["data.seq_len=65536"], 65536),
        ("gpt2-124m", [], 1024),
    ):
        assert plan.read_run_without_data(model, words, notes.append).seq_len == length
    monkeypatch.setattr("gridformer.launch.plan.ESTIMATED_TOKENS", 100)
    path = tmp_path / "mine.yaml"
    model = "{family: llama, n_layers: 1, hidden_size: 8, n_heads: 2, max_seq_len: 200}"
    path.write_text(f"model: {model}\ndata: {{path: {token_folder}}}\n")
    assert plan.read_run_without_data(path, (), notes.append).seq_len == 200, (
        "as it trains on its data"
    )
    assert plan.check_run(path).seq_len == 200
    assert not notes


def test_commands_say_which_length_they_assume(tmp_path: Path) -> None:
    path, said = tmp_path / "mine.yaml", "data.seq_len is not set: this is for sequences of 8,192"
    model = "{family: llama, n_layers: 1, hidden_size: 8, n_heads: 2, vocab_size: 64, "
    path.write_text(f"model: {model}max_seq_len: 9000}}\ndata: {{path: none}}\n")
    words = [str(path), "train.global_batch=1"]
    assert said in gridformer_here("memory", *words).stderr
    assert said in gridformer_here("check", *words).stderr
    on = ("--cluster", "dgx-h100", "--json")
    (first, *_) = json.loads(gridformer_here("predict", *words, *on).stdout)["warnings"]
    planned = gridformer_here("plan", *words, *on, "--devices", "1", "--top", "1")
    (best,) = json.loads(planned.stdout)["layouts"]
    assert said in first
    assert said in best["warnings"][0]


HERE = Place("parallel/pipeline/executor.py", 7, "_receive")


def problem(kind: str) -> Problem:
    return Problem(kind, (0, 1), HERE, "rank 0 waits", "use another layout", "pp")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Pretend that there are GPUs and that a check finds one problem of some kinds."""
    calls: list[dict[str, Any]] = []

    def check_step(run: RunConfig, decisions: Any, **how: Any) -> Report:
        calls.append(how)
        some = [problem(kind) for kind in ("deadlock", "read-back", "error", "untraced")]
        return Report(some, [0, 1], 2, 10)

    monkeypatch.setattr(gridformer.check, "check_step", check_step)
    monkeypatch.setattr(room, "on_gpu", lambda run: True)
    return calls


def refusals(layout: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return why a run is refused, and what is told besides."""
    run, told = a_run(layout, {"n_layers": 2}, {}), list[str]()
    problems = plan.preflight_problems(run, lambda text, _: told.append(text), decide_run(run))
    return problems, [text for text in told if text]


def test_what_cannot_work_is_refused_and_an_error_is_told(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process and processors are not checked."""
    assert refusals({}) == ([], [])
    assert asked == []
    (circle,), (error,) = refusals({"scheme": "megatron", "cols": 2})
    assert circle.startswith("ranks wait for each other in a circle (ranks 0-1, axis pp, at par")
    assert circle.endswith("rank 0 waits; use another layout")
    assert error.startswith("the step raises an error (ranks 0-1, axis pp, at par")
    assert asked == [{"most": 0, "limit_s": 5.0}], "few ranks, for a few seconds"
    monkeypatch.setattr(room, "on_gpu", lambda run: False)
    assert refusals({"scheme": "megatron", "cols": 2}) == ([], [])
    assert len(asked) == 1


def planned() -> list[str]:
    """Plan a pipeline on GPUs whose messages share a group; return why it is refused."""
    layout = {"pp": 4, "micro_batches": 5}
    model = {"n_layers": 4, "max_seq_len": 8}
    run = a_run(layout, model, {"global_batch": 5, "device": "cuda"})
    with one_group_for_all_messages():
        try:
            plan.plan_checked(run, room=Room(2**50, "there is enough"))
        except ConfigError as error:
            return error.problems
    raise AssertionError("the run was not refused")


def test_a_plan_is_refused_whose_ranks_would_wait_forever(gpu: InProcess) -> None:
    (text,) = gpu(planned)
    assert text.startswith("ranks wait for each other in a circle (rank")
    assert "axis pp, at parallel/pipeline/executor.py" in text
    assert "layout.pipeline=gpipe" in text
