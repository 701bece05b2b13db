"""torchrun's --max-restarts with whole runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import verify
from gridformer.train.metrics import read_metrics
from tests.support.launch.programs import ROOT

pytestmark = pytest.mark.full
LIMIT_S = 400.0


def run_file(folder: Path, data: Path, **train: Any) -> Path:
    """Write a run on two processes that saves every third step."""
    settings = {"steps": 6, "global_batch": 4, "eval_every": 0, "save_every": 3, "device": "cpu"}
    sections: dict[str, Any] = {
        "model": {"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 16},
        "data": {"path": str(data)},
        "layout": {"scheme": "single", "rows": 1, "cols": 1, "dp": 2},
        "train": {**settings, "dtype": "float64", **train},
    }
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def torchrun(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out) if "loss" in line]


def test_a_killed_worker_is_restarted(token_folder: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    path = run_file(tmp_path, token_folder)
    two = ("--standalone", "--nproc-per-node", "2")
    done = torchrun(*two, "-m", "gridformer", "train", path, "--out", whole)
    assert done.returncode == 0, done.stderr
    dying = ("-m", "tests.support.launch.dying_command", "train", path, "--out", cut)
    done = torchrun(*two, "--max-restarts", "1", *dying)
    assert done.returncode == 0, done.stderr
    assert (cut / "died").exists()
    assert losses(cut) == losses(whole)
    folder = find.latest(cut)
    assert folder is not None
    assert verify(folder).step == 6
