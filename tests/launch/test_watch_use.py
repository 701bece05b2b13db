"""A process of `generate` or `evaluate` that is stopped is named, as in training."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from gridformer.checkpoint import checkpoint
from gridformer.config import parse_run
from gridformer.launch.watch import UseWatch
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.train.step import Stepper
from tests.support.commands import gridformer_here
from tests.support.launch.programs import LIMIT_S, ROOT, pid_of, processes

TIMEOUT_S = 3
LAYOUT = ("layout.scheme=megatron", "layout.cols=2", "--device", "cpu")
# The last word is followed by a text or a file of texts.
COMMANDS = {"generate": ("--greedy", "--prompt"), "evaluate": ("--batch-size", "1", "--tasks")}


@pytest.fixture(scope="module")
def run_dir(token_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory with a checkpoint of an untrained GPT-2."""
    out = tmp_path_factory.mktemp("run")
    model = {"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 48, "vocab_size": 301}
    run = parse_run({"model": model, "data": {"path": str(token_folder)}})
    built = build_parallel(run.model, run.layout, Axes(), 3, torch.device("cpu"), "float32")
    updates = Stepper(built, run.train, Axes()).updates
    updates.allocate(0)
    checkpoint.save(out, 0, 0, run, built, updates, Axes())
    (out / "tokenizer.json").write_bytes((token_folder / "tokenizer.json").read_bytes())
    return out


@pytest.mark.parametrize("command", COMMANDS)
def test_processes_are_watched(command: str, run_dir: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("one line\n")
    words: list[str | Path] = [command, run_dir, *LAYOUT, *COMMANDS[command], f"text:{texts}"]
    with patch("gridformer.launch.launch") as launch:
        for more in ([], ["--timeout", "7"]):
            done = gridformer_here(*words, *more)
            assert done.returncode == 0, done.stderr
    jobs = [call.args[1][0] for call in launch.call_args_list]
    assert [job.timeout_s for job in jobs] == [600.0, 7.0]
    assert all(isinstance(pickle.loads(pickle.dumps(job)).watch, UseWatch) for job in jobs)
    assert gridformer_here(*words, "--timeout", "nan").returncode == 2


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_stopped_process_is_named(command: str, run_dir: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"line {i} of a file\n" for i in range(100_000)))  # takes minutes
    words = [*COMMANDS[command], f"text:{texts}"]
    if command == "generate":
        words = ["--greedy", "--batch-size", "1", "--prompts", str(texts)]
    limit = ("--timeout", str(TIMEOUT_S))
    before = sorted(run_dir.rglob("*"))
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [*(sys.executable, "-m", "gridformer", command, run_dir), *LAYOUT, *words, *limit],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        try:
            until = time.monotonic() + LIMIT_S
            while (pid := pid_of(process.pid, 1)) is None:
                assert process.poll() is None, (tmp_path / "said").read_text()
                assert time.monotonic() < until
                time.sleep(0.02)
            time.sleep(1.0)  # mostly it has begun by now; if not it is named all the same
            os.kill(pid, signal.SIGSTOP)
            code = process.wait(LIMIT_S)
        finally:
            for folder in processes(process.pid):
                os.kill(int(folder.name), signal.SIGKILL)
    err = (tmp_path / "said").read_text()
    assert code == 1, err
    assert f"The run hangs: rank 1 (pid {pid} on " in err
    assert "is stopped, as by SIGSTOP" in err
    assert f"(--timeout={TIMEOUT_S}) in " in err
    assert "before the first step" not in err
    assert sorted(run_dir.rglob("*")) == before, "such a command only reads"
