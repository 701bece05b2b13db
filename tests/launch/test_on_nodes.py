"""The scripts of `gridformer launch slurm` on four nodes, one of which dies or gets a signal.

The nodes are network namespaces where that is allowed. The runs are compared with an undisturbed
one on this machine, in float64.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gridformer.train.heartbeat import health_of
from gridformer.train.metrics import read_metrics
from tests.support.commands import gridformer_here
from tests.support.launch.slurm import LIMIT_S, Slurm, slurm

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
STEPS = 30


@pytest.fixture(scope="module")
def run_file(token_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sections = {
        "model": {"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 16},
        "data": {"path": str(token_folder)},
        "layout": {"scheme": "optimus", "rows": 2, "cols": 2},
        "train": {
            "steps": STEPS, "global_batch": 4, "eval_every": 0, "eval_batches": 1,
            "save_every": 4, "dtype": "float64", "device": "cpu",
        },
    }  # fmt: skip
    path = tmp_path_factory.mktemp("runs") / "mine.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


@pytest.fixture(scope="module")
def undisturbed(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    one = ("layout.scheme=single", "layout.rows=1", "layout.cols=1")
    done = gridformer_here("train", str(run_file), *one, "--out", str(out))
    assert done.returncode == 0, done.stderr
    return losses(out)


@pytest.fixture
def four_nodes(tmp_path: Path) -> Iterator[Slurm]:
    with slurm(tmp_path, 4) as found:
        yield found


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out) if "loss" in line]


def script_of(run_file: Path, per_node: int, folder: Path, *options: str) -> Path:
    path = folder / "job.sh"
    done = gridformer_here(
        "launch", "slurm", str(run_file), "--devices-per-node", str(per_node),
        "--run-dir", str(folder / "run"), "--out", str(path), *options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path


def wait_for_step(job: subprocess.Popen[str], out: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while len(losses(out)) < step:
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def end(job: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = job.communicate(timeout=LIMIT_S)
    return job.returncode, said


def test_a_node_that_dies(
    run_file: Path, undisturbed: list[float], four_nodes: Slurm, tmp_path: Path
) -> None:
    """Slurm runs a job again whose node has failed; it goes on from the last checkpoint."""
    script, out = script_of(run_file, 1, tmp_path), tmp_path / "run"
    job = four_nodes.start(script)
    wait_for_step(job, out, 10)
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
    run_file: Path,
    undisturbed: list[float],
    four_nodes: Slurm,
    tmp_path: Path,
) -> None:
    """It saves, exits with 75, puts itself into the queue again, and then loses no step."""
    script = script_of(run_file, per_node, tmp_path, "--tasks", tasks)
    out = tmp_path / "run"
    job = four_nodes.start(script)
    wait_for_step(job, out, 5)
    four_nodes.signal_step(signal.SIGUSR1)
    code, said = end(job)
    assert (code, four_nodes.requeued) == (75, True), said
    before = len(losses(out))
    assert before < STEPS
    code, said = end(four_nodes.start(script, attempt=1))
    assert code == 0, said
    assert f"resuming after step {before}" in said
    assert losses(out) == pytest.approx(undisturbed, abs=1e-9)


def test_bad_input_is_not_tried_again(run_file: Path, four_nodes: Slurm, tmp_path: Path) -> None:
    script = script_of(run_file, 2, tmp_path, "--tasks", "node")
    script.write_text(script.read_text().replace("train ", "train train.lr=-1 ", 1))
    text = script.read_text()
    assert "train.lr=-1" in text
    code, said = end(four_nodes.start(script))
    assert (code, four_nodes.requeued) == (2, False), said
