"""A rank of a real training run is stopped, on each axis of the mesh; `make test-all` runs this."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gridformer.launch.hang import Messages
from gridformer.launch.hang_report import all_ranks, reports
from tests.support.launch.programs import LIMIT_S, ROOT, pid_of, processes

pytestmark = pytest.mark.full
TIMEOUT_S = 4
MODEL = "{family: gpt2, n_layers: 4, hidden_size: 32, n_heads: 4, max_seq_len: 16, dropout: 0.0}"
# The axes on which a rank may wait for one that is stopped. It may also wait for one that waits.
LAYOUTS = {
    "rows": ("optimus", "rows=2 layout.cols=2", {"row", "col", "grid", "world"}),
    "cols": ("megatron", "cols=2", {"col", "grid", "world", "row"}),
    "branches": ("subgraph", "branches=2", {"branch", "dp_branch", "world"}),
    "dp": ("megatron", "dp=2", {"dp", "dp_branch", "world"}),
    "pp": ("megatron", "pp=2", {"pp", "world"}),
}


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
        f"timeout_s: {TIMEOUT_S}}}\n"
    )
    words = [f"layout.{layout.split()[0]}", *layout.split()[1:]]
    process = subprocess.Popen(
        [sys.executable, "-m", "gridformer", "train", run, "--out", out, *words],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + LIMIT_S
        metrics = out / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.1)
        pid = pid_of(process.pid, 1)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        _, err = process.communicate(timeout=LIMIT_S)
    finally:
        for folder in processes(process.pid):
            os.kill(int(folder.name), signal.SIGKILL)
    assert process.returncode == 1, err
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
