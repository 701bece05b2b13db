"""Planning a run: what is refused is refused before torch is loaded, which takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gridformer.launch.plan import check_run, check_run_dir, read_run_without_data
from gridformer.launch.run_lock import is_held
from gridformer.train.metrics import read_metrics
from gridformer.utils.errors import ConfigError, UserError
from tests.support.commands import gridformer_here

SCRIPT = """
import sys
from gridformer.cli.app import app
try:
    app(["train", "demo", "layout.cols=3"], standalone_mode=False)
except Exception as error:
    print(type(error).__name__, "torch" in sys.modules)
"""


def test_a_refusal_loads_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout == "ConfigError False\n", done.stderr


@pytest.mark.parametrize("name", ["index.json", "config.json", "config.yaml"])
def test_a_run_replaces_no_files_of_others(tmp_path: Path, name: str) -> None:
    """A folder of tokens, a model of Hugging Face, and the folder of a run file."""
    check_run_dir(tmp_path / "new")
    check_run_dir(tmp_path)
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"has a file {name}"):
        check_run_dir(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    check_run_dir(tmp_path)


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
        check_run_dir(tmp_path)


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
        read_run_without_data("demo-4m")
    assert read_run_without_data("demo-4m", ["model.vocab_size=300"]).model.vocab_size == 300


def test_the_length_of_a_long_context_is_assumed_for_estimates_alone(
    tmp_path: Path, token_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    assert read_run_without_data("llama-3.1-8b", (), notes.append).seq_len == 8192
    assert notes == [
        "data.seq_len is not set: this is for sequences of 8,192 tokens, and llama-3.1-8b reads up "
        "to 131,072"
    ]
    notes.clear()
    for model, words, length in (
        ("llama-3.1-8b", ["data.seq_len=65536"], 65536),
        ("gpt2-124m", [], 1024),
    ):
        assert read_run_without_data(model, words, notes.append).seq_len == length
    monkeypatch.setattr("gridformer.launch.plan.ESTIMATED_TOKENS", 100)
    path = tmp_path / "mine.yaml"
    model = "{family: llama, n_layers: 1, hidden_size: 8, n_heads: 2, max_seq_len: 200}"
    path.write_text(f"model: {model}\ndata: {{path: {token_folder}}}\n")
    assert read_run_without_data(path, (), notes.append).seq_len == 200, "as it trains on its data"
    assert check_run(path).seq_len == 200
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
