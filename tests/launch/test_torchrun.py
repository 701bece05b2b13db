"""torchrun's --max-restarts and --nnodes MIN:MAX with whole runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import read_manifest, verify_checkpoint
from gridformer.train.metrics import read_metrics
from gridformer.utils.errors import CheckpointError
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
    assert verify_checkpoint(folder).step == 6


def agent(port: int, *words: str | Path) -> subprocess.Popen[str]:
    """Start torchrun as on one of at most two machines, with two processes."""
    conf = "last_call_timeout=5"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
        *("--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic", "--rdzv-conf", conf),
        *("--local-addr", "127.0.0.1", "-m", "gridformer", "train", *map(str, words)),
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not any(line["step"] >= step for line in read_metrics(out)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.1)


def test_a_lost_machine(token_folder: Path, tmp_path: Path) -> None:
    """Four processes on two machines, then two on one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    changed = ["layout.dp=4", "train.elastic=true", "train.steps=4000"]
    changed.append("train.lr_schedule=constant")
    path = run_file(tmp_path, token_folder, save_every=1, keep_checkpoints=2)
    agents = [agent(port, path, *changed, "--out", moved) for _ in range(2)]
    try:
        wait_for_step(moved, 10, agents[0])
        lost = 1 if serves(agents[0], port) else 0
        kept = agents[1 - lost]
        kill_all(agents[lost])
        reached = read_metrics(moved)[-1]["step"]
        wait_for_step(moved, reached + 10, kept)
        assert last_layout(moved) == 2
        reached = read_metrics(moved)[-1]["step"]
    finally:
        for one in agents:
            kill_all(one)
    said = kept.communicate()[0]
    assert "ELASTIC: 2 processes instead of 4: layout dp=4, m=1 becomes dp=2, m=2" in said
    got = losses(moved)[: reached - 1]
    done = torchrun(
        *("--standalone", "--nproc-per-node", "4", "-m", "gridformer", "train", path),
        *(*changed, f"train.steps={len(got)}"),
        *("--out", whole),
    )
    assert done.returncode == 0, done.stderr
    assert losses(whole) == pytest.approx(got, rel=1e-9)


def serves(process: subprocess.Popen[str], port: int) -> bool:
    """Whether an agent is the one that serves the rendezvous."""
    inodes = {
        line.split()[9]
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{process.pid}/net/{name}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].rpartition(":")[2], 16) == port
    }
    links = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
    return any(f"socket:[{inode}]" in links for inode in inodes)


def last_layout(out: Path) -> int:
    """Return the number of replicas in which the newest checkpoint was written."""
    folder = find.latest(out)
    try:
        return int(read_manifest(folder).run["layout"]["dp"]) if folder else 0
    except CheckpointError:  # removed meanwhile
        return 0


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kill an agent and its workers, as if their machine had lost its power."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = children.read_text().split() if children.exists() else []
    for pid in (process.pid, *map(int, workers)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
