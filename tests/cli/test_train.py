"""The command line as a user meets it, with real processes, signals and files."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import verify_checkpoint
from gridformer.launch.plan import plan_run
from gridformer.train.metrics import read_metrics
from tests.support.commands import gridformer_alone, gridformer_here, write_run
from tests.support.marks import full_unless

COMMAND = [sys.executable, "-m", "gridformer"]
GRID = {"scheme": "optimus", "rows": 2, "cols": 2}
KEYS = {
    *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_time_s", "data_wait_s"),
    *("model_tflops", "hardware_tflops"),
}


@pytest.fixture(scope="module")
def run_file(token_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    train = {"steps": 6, "global_batch": 4, "eval_every": 3, "eval_batches": 2}
    path = tmp_path_factory.mktemp("runs") / "mine.yaml"
    return write_run(path, token_folder, layout=GRID, train=train)


def losses(out: Path) -> list[float]:
    return [m["loss"] for m in read_metrics(out) if "loss" in m]


def wait_for_step(out: Path, step: int) -> None:
    deadline = time.monotonic() + 180
    while not any(m["step"] >= step for m in read_metrics(out)):
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.05)


def wait_until_nobody_is_left(session: int) -> None:
    """The fork server ends a moment after the command, once it notices the command's end."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("some process of the run is still there")


def test_a_run_writes_all_promised_files(run_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = gridformer_alone("train", run_file, "train.lr=0.001", "--out", out, "--nproc", "4")
    assert done.returncode == 0, done.stderr
    assert "optimus 2x2" in done.stdout
    assert "FLOP/s per process" in done.stdout
    assert "gloo" in done.stdout or "nccl" in done.stdout

    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(7))
    assert all(set(line) - {"val_loss"} == KEYS for line in lines[1:])
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 3, 6]
    assert [line["tokens"] for line in lines] == [64 * step for step in range(7)]
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["train"]["lr"] == 0.001
    assert config["model"]["vocab_size"] == 301, "resolved from the data"
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((out / "tensorboard").glob("events.out.tfevents.*"))
    folder = find.latest(out)
    assert folder is not None
    assert verify_checkpoint(folder).step == 6

    again = gridformer_here("train", run_file, "--out", out)
    assert again.returncode == 0
    assert "6 of 6 steps" in again.stdout

    generated = gridformer_here("generate", out, "--prompt", "line 7", "--max-tokens", "20")
    assert generated.returncode == 0, generated.stderr
    assert generated.stdout.startswith("line 7")
    assert len(generated.stdout) > len("line 7\n")


def test_a_run_that_resumes_says_what_has_changed(token_folder: Path, tmp_path: Path) -> None:
    train = {"steps": 2, "global_batch": 4, "eval_batches": 1, "lr": 1e-3, "warmup_steps": 0}
    path, out = write_run(tmp_path / "mine.yaml", token_folder, train=train), tmp_path / "out"
    assert gridformer_here("train", path, "--out", out).returncode == 0

    def changes(*overrides: str) -> tuple[str, ...]:
        return plan_run(path, overrides, out=out).changes

    assert changes("train.max_hours=2", "train.trace_step=3") == ()
    grid = ("layout.scheme=optimus", "layout.rows=2", "layout.cols=1")
    assert changes(*grid, "train.on_divergence=skip") == (
        "layout was single device, now optimus 2x1",
        "train.on_divergence was stop, now skip",
    )
    assert changes("train.steps=4", "train.lr_schedule=constant") == (
        "train.steps was 2, now 4",
        "train.lr_schedule was cosine, now constant",
        "the learning rate of step 3 is 0.001, after 0.0001 in step 2, because its schedule "
        "changed",
    )
    other = ("data.seq_len=8", "data.restart=true")
    assert changes(*other) == ("data.seq_len was 16, now 8",)
    done = gridformer_here("train", path, "train.steps=3", "--out", out)
    after = done.stdout[done.stdout.index("resuming after step 2 from ") :].splitlines()
    assert after[1] == "    train.steps was 2, now 3"
    unnamed, named = (
        json.loads(gridformer_here("evaluate", out, "--json", *words).stdout)["tasks"]
        for words in ((), ("--set", "val"))
    )
    assert [*unnamed] == ["set:val"]
    assert unnamed == named


FEWER = "layout.rows=1"  # two processes; test_launch.py tests what a signal does to more
LONGER = (FEWER, "train.steps=30", "train.save_every=0", "train.eval_every=0")


@pytest.fixture(scope="module")
def not_stopped(run_file: Path) -> list[float]:
    """Return the losses of a run that nobody stops."""
    out = run_file.parent / "whole"
    assert gridformer_here("train", run_file, *LONGER, "--out", out).returncode == 0
    return losses(out)


@pytest.mark.parametrize(
    ("signum", "to_group", "code"),
    full_unless(
        lambda case: case[0] == signal.SIGINT,
        [(signal.SIGTERM, False, 75), (signal.SIGINT, True, 130)],
        unpack=True,
    ),
    ids=["SIGTERM-to-the-command", "Ctrl-C"],
)
def test_a_stopped_run_resumes_exactly(
    run_file: Path,
    not_stopped: list[float],
    tmp_path: Path,
    signum: signal.Signals,
    to_group: bool,
    code: int,
) -> None:
    stopped, words = tmp_path / "stopped", [str(run_file), *LONGER]
    with subprocess.Popen(
        [*COMMAND, "train", *words, "--out", str(stopped)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        wait_for_step(stopped, 3)
        (os.killpg if to_group else os.kill)(process.pid, signum)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    assert "Traceback" not in output
    folder = find.latest(stopped)
    assert folder is not None
    assert 3 <= verify_checkpoint(folder).step < 30
    wait_until_nobody_is_left(process.pid)
    resumed = gridformer_here("train", *words, "--out", stopped)
    assert resumed.returncode == 0, resumed.stderr
    assert losses(stopped) == not_stopped
    assert not_stopped[-1] < not_stopped[0] - 0.1, "it learns"


def test_bad_input_is_refused_before_anything_starts(run_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    bad = gridformer_here(
        *("train", run_file, "layout.cols=3", "layout.dp=2"),
        *("train.global_batch=5", "--nproc", "4", "--out", out),
    )
    assert bad.returncode == 2
    assert "Traceback" not in bad.stderr
    for part in ("model.n_heads=2", "model.hidden_size=16", "train.global_batch=5", "--nproc=4"):
        assert part in bad.stderr
    missing = gridformer_here("train", run_file, "data.path=nowhere", "--out", out)
    assert missing.returncode == 2
    assert "gridformer prepare" in missing.stderr
    assert not out.exists()
