"""Runs and commands that hang, with real processes: the watch says why, on any launcher."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gridformer.config import parse_run
from gridformer.launch.hang import Messages
from gridformer.launch.hang_report import all_ranks, reports
from gridformer.launch.watch import UseWatch
from gridformer.train.metrics import read_metrics
from tests.support.checkpoints import save_model
from tests.support.commands import gridformer_here
from tests.support.launch import programs
from tests.support.launch.hanging import TIMEOUT_S


def hangs(
    start: programs.Start, folder: Path, name: str, n: int, *before: str
) -> tuple[str, dict[str, Any]]:
    """Run what hangs. Returns the end of standard error, and the report in the run directory."""
    process = start(f"hanging:{name}", n, *before)
    pids = programs.wait_for(folder, [f"pid{rank}" for rank in range(n)], process)
    code, _, err = programs.finish(process)
    assert code == 1, err
    programs.assert_gone(pids)
    (path,) = folder.glob("hang-*.json")
    report = json.loads(path.read_text())
    assert "\n".join(report["report"]) in err
    return err, report


def test_a_stopped_rank_is_named(start: programs.Start, tmp_path: Path) -> None:
    err, report = hangs(start, tmp_path, "stopped", 3)
    assert (report["kind"], report["culprits"]) == ("stopped", [1])
    assert (sorted(report["arrived"]), report["missing"]) == ([0, 2], [1])
    pid = (tmp_path / "pid1").read_text()
    assert f"rank 1 (pid {pid} on " in report["reason"]
    assert f"kill -CONT {pid}" in report["reason"]
    said = re.sub(r"waited [\d.]+ s", "waited", err)
    assert (
        f'has waited (train.timeout_s={TIMEOUT_S:g}) in all_reduce on axis col, label "sum", 8 '
        "elements, message 3 of ranks 0, 1 and 2, in step 3, in 0 (forward)."
    ) in said
    assert "Stack of rank 1, as it was" in err
    assert err.rstrip().endswith(".json.")
    assert "Traceback" not in err
    stack = "".join(report["ranks"]["0"]["stack"])
    assert "in forward" in stack
    assert "comm.all_reduce" in stack


# What hangs, the kind and the culprits, and phrases of the reason, or of a stack in brackets.
HANGS: dict[str, tuple[str, list[int], list[str]]] = {
    "slow": ("slow", [1], ["increase train.timeout_s", "[torch.randn(100, 100)]"]),
    "asleep": ("stuck", [1], ["[time.sleep(FAR_S)]"]),
    "other_size": (
        "diverged",
        [0, 1],
        [
            'all_reduce on axis col, label "sum", 8 elements on rank 0',
            'all_gather on axis col, label "rows", 4 elements on rank 1',
            "number 3 of ranks 0 and 1",
        ],
    ),
    "other_order": ("diverged", [0, 1],
        [f"rank {r} waits for rank {1 - r} in recv on axis pp" for r in range(2)]),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", HANGS)
def test_why_a_run_hangs(start: programs.Start, tmp_path: Path, name: str) -> None:
    err, report = hangs(start, tmp_path, name, 2)
    kind, culprits, phrases = HANGS[name]
    assert (report["kind"], sorted(report["culprits"])) == (kind, culprits)
    for phrase in phrases:
        assert phrase.strip("[]") in (err if phrase.startswith("[") else report["reason"])


@pytest.mark.full
@pytest.mark.parametrize(("name", "kind"), [("stopped", "stopped"), ("slow", "slow")])
def test_a_hang_under_torchrun_is_named(
    start: programs.Start, tmp_path: Path, name: str, kind: str
) -> None:
    err, report = hangs(start, tmp_path, name, 2, *programs.TORCHRUN, "2")
    assert (report["kind"], report["culprits"]) == (kind, [1])
    _, _, cause = err.rpartition("Root Cause (first observed failure)")
    assert "rank      : 0 (local_rank: 0)" in cause
    assert "The run hangs: rank 1" in cause


LIMIT = 4
MODEL = "{family: gpt2, n_layers: 4, hidden_size: 32, n_heads: 4, max_seq_len: 16, dropout: 0.0}"
# The axes on which a rank may wait for one that is stopped. It may also wait for one that waits.
LAYOUTS = {
    "rows": ("optimus", "rows=2 layout.cols=2", {"row", "col", "grid", "world"}),
    "cols": ("megatron", "cols=2", {"col", "grid", "world", "row"}),
    "branches": ("subgraph", "branches=2", {"branch", "dp_branch", "world"}),
    "dp": ("megatron", "dp=2", {"dp", "dp_branch", "world"}),
    "pp": ("megatron", "pp=2", {"pp", "world"}),
}


def with_a_stopped_rank(
    words: Sequence[str | Path], folder: Path, begun: Callable[[], bool]
) -> tuple[int, str, int]:
    """Stop rank 1 of a command once it has begun; return its exit code, its errors, and a pid."""
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "gridformer", *words],
            cwd=programs.ROOT,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        try:
            until = time.monotonic() + programs.LIMIT_S
            while not begun() or (pid := programs.pid_of(process.pid, 1)) is None:
                assert process.poll() is None, (folder / "said").read_text()
                assert time.monotonic() < until
                time.sleep(0.05)
            time.sleep(1.0)  # mostly it has begun by now; if not it is named all the same
            os.kill(pid, signal.SIGSTOP)
            code = process.wait(programs.LIMIT_S)
        finally:
            for entry in programs.processes(process.pid):
                os.kill(int(entry.name), signal.SIGKILL)
    return code, (folder / "said").read_text(), pid


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_stopped_rank_is_named_on_each_axis(
    name: str, token_folder: Path, tmp_path: Path
) -> None:
    scheme, layout, axes = LAYOUTS[name]
    run, out = tmp_path / "run.yaml", tmp_path / "out"
    run.write_text(
        f"name: hang\nmodel: {MODEL}\ndata: {{path: {token_folder}, seq_len: 16}}\n"
        f"layout: {{scheme: {scheme}, micro_batches: 2}}\n"
        "train: {device: cpu, steps: 100000, global_batch: 8, save_every: 0, eval_every: 0, "
        f"timeout_s: {LIMIT}}}\n"
    )
    words = [f"layout.{layout.split()[0]}", *layout.split()[1:]]
    code, err, pid = with_a_stopped_rank(
        ["train", run, "--out", out, *words], tmp_path, lambda: len(read_metrics(out)) > 2
    )
    assert code == 1, err
    (path,) = out.glob("hang-*.json")
    report = json.loads(path.read_text())
    assert (report["kind"], report["culprits"]) == ("stopped", [1]), err
    assert f"rank 1 (pid {pid} on " in report["reason"]
    (said,) = (line for line in report["report"] if line.startswith("Rank "))
    axis = re.search(r"on axis (\w+)", said)
    assert axis is not None, said
    assert axis[1] in axes, said
    assert re.search(r"in step \d+", said), said
    assert "\n".join(report["report"]) in err
    assert_messages_agree(report)


def assert_messages_agree(report: dict[str, Any]) -> None:
    """Check that in a healthy order no message would be taken for a diverged one."""
    told = {int(rank): reports().validate_python(one) for rank, one in report["ranks"].items()}
    ranks = all_ranks(told, len(told) + 1)
    assert all(one.lanes for one in ranks.values())
    found = [Messages(ranks).mismatch(rank) for rank in ranks]
    assert found == [None] * len(ranks)


LAYOUT = ("layout.scheme=megatron", "layout.cols=2", "--device", "cpu")
# The last word is followed by a text or a file of texts.
COMMANDS = {"generate": ("--greedy", "--prompt"), "evaluate": ("--batch-size", "1", "--tasks")}


@pytest.fixture(scope="module")
def run_dir(token_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory with a checkpoint of an untrained GPT-2."""
    out = tmp_path_factory.mktemp("run")
    model = {"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 48, "vocab_size": 301}
    run = parse_run({"model": model, "data": {"path": str(token_folder)}})
    save_model(out, run, 0)
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
    before = sorted(run_dir.rglob("*"))
    code, err, pid = with_a_stopped_rank(
        [command, run_dir, *LAYOUT, *words, "--timeout", str(LIMIT)], tmp_path, lambda: True
    )
    assert code == 1, err
    assert f"The run hangs: rank 1 (pid {pid} on " in err
    assert "is stopped, as by SIGSTOP" in err
    assert f"(--timeout={LIMIT}) in " in err
    assert "before the first step" not in err
    assert sorted(run_dir.rglob("*")) == before, "such a command only reads"
