"""Whole runs under torchrun and Slurm's scripts: restarts, lost machines, signals.

The nodes of Slurm are network namespaces where that is allowed. The runs are compared with an
undisturbed one on this machine, in float64.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import read_manifest, verify_checkpoint
from gridformer.train.heartbeat import health_of
from gridformer.train.metrics import read_metrics
from gridformer.utils.errors import CheckpointError
from tests.support.commands import gridformer_here, python_alone
from tests.support.launch.programs import ROOT
from tests.support.launch.slurm import Slurm, slurm

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
LIMIT_S = 400.0
STEPS = 30
REPLICAS = {"scheme": "single", "rows": 1, "cols": 1, "dp": 2}


def run_file(folder: Path, data: Path, layout: dict[str, Any], **train: Any) -> Path:
    settings = {"global_batch": 4, "eval_every": 0, "device": "cpu", "dtype": "float64", **train}
    sections: dict[str, Any] = {
        "model": {"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 16},
        "data": {"path": str(data)},
        "layout": layout,
        "train": settings,
    }
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out) if "loss" in line]


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not any(line["step"] >= step for line in read_metrics(out)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.05)


def torchrun(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return python_alone("-m", "torch.distributed.run", *words, cwd=ROOT, timeout=LIMIT_S)


def test_a_killed_worker_is_restarted(token_folder: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    path = run_file(tmp_path, token_folder, REPLICAS, steps=6, save_every=3)
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


def test_torchrun_shows_a_refusal_once(token_folder: Path, tmp_path: Path) -> None:
    path = run_file(tmp_path, token_folder, {"scheme": "megatron", "cols": 2}, steps=1)
    train = ("--standalone", "--nproc-per-node", "2", "-m", "gridformer", "train", path)
    refused = torchrun(*train, "train.memory_gib=0.0001", "--out", tmp_path / "out")
    assert refused.returncode == 1
    assert refused.stderr.count("error: ") == 1, refused.stderr
    assert "train.memory_gib=0.0001" in refused.stderr
    _, _, cause = refused.stderr.rpartition("Root Cause (first observed failure)")
    assert "exitcode  : 2" in cause
    done = torchrun(*train, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 processes over gloo") == 1


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


def test_a_lost_machine(token_folder: Path, tmp_path: Path) -> None:
    """Four processes on two machines, then two on one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    changed = ["layout.dp=4", "train.elastic=true", "train.steps=4000"]
    changed.append("train.lr_schedule=constant")
    path = run_file(tmp_path, token_folder, REPLICAS, save_every=1, keep_checkpoints=2)
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


@pytest.fixture(scope="module")
def grid(token_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a grid of four."""
    folder, layout = tmp_path_factory.mktemp("runs"), {"scheme": "optimus", "rows": 2, "cols": 2}
    return run_file(folder, token_folder, layout, steps=STEPS, save_every=4, eval_batches=1)


@pytest.fixture(scope="module")
def undisturbed(grid: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    one = ("layout.scheme=single", "layout.rows=1", "layout.cols=1")
    done = gridformer_here("train", str(grid), *one, "--out", str(out))
    assert done.returncode == 0, done.stderr
    return losses(out)


@pytest.fixture
def four_nodes(tmp_path: Path) -> Iterator[Slurm]:
    with slurm(tmp_path, 4) as found:
        yield found


def script_of(grid: Path, per_node: int, folder: Path, *options: str) -> Path:
    path = folder / "job.sh"
    done = gridformer_here(
        "launch", "slurm", str(grid), "--devices-per-node", str(per_node),
        "--run-dir", str(folder / "run"), "--out", str(path), *options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path


def end(job: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = job.communicate(timeout=LIMIT_S)
    return job.returncode, said


def test_a_node_that_dies(
    grid: Path, undisturbed: list[float], four_nodes: Slurm, tmp_path: Path
) -> None:
    """Slurm runs a job again whose node has failed; it goes on from the last checkpoint."""
    script, out = script_of(grid, 1, tmp_path), tmp_path / "run"
    job = four_nodes.start(script)
    wait_for_step(out, 10, job)
    four_nodes.kill_node(2)
    code, said = end(job)
    assert (code, four_nodes.requeued) == (137, False), said
    assert not health_of(out).ok
    code, said = end(four_nodes.start(script, attempt=1))
    assert code == 0, said
    assert "resuming after step" in said
    assert losses(out) == pytest.approx(undisturbed, abs=1e-9)
    assert health_of(out).ok


@pytest.mark.parametrize(("per_node", "tasks"), [(1, "device"), (2, "node")])
def test_a_job_that_is_told_to_stop(
    per_node: int,
    tasks: str,
    grid: Path,
    undisturbed: list[float],
    four_nodes: Slurm,
    tmp_path: Path,
) -> None:
    """It saves, exits with 75, puts itself into the queue again, and then loses no step."""
    script = script_of(grid, per_node, tmp_path, "--tasks", tasks)
    out = tmp_path / "run"
    job = four_nodes.start(script)
    wait_for_step(out, 5, job)
    four_nodes.signal_step(signal.SIGUSR1)
    code, said = end(job)
    assert (code, four_nodes.requeued) == (75, True), said
    before = len(losses(out))
    assert before < STEPS
    code, said = end(four_nodes.start(script, attempt=1))
    assert code == 0, said
    assert f"resuming after step {before}" in said
    assert losses(out) == pytest.approx(undisturbed, abs=1e-9)


def test_bad_input_is_not_tried_again(grid: Path, four_nodes: Slurm, tmp_path: Path) -> None:
    script = script_of(grid, 2, tmp_path, "--tasks", "node")
    script.write_text(script.read_text().replace("train ", "train train.lr=-1 ", 1))
    text = script.read_text()
    assert "train.lr=-1" in text
    code, said = end(four_nodes.start(script))
    assert (code, four_nodes.requeued) == (2, False), said
