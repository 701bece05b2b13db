"""`gridformer plan` as a user meets it: what it emits trains, and it says so if nothing fits."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gridformer.cli.plan import _run as planned_run
from gridformer.cluster.file import load_cluster
from gridformer.config import load_run
from gridformer.train.metrics import read_metrics
from gridformer.utils.errors import UserError
from tests.support.commands import gridformer_here, write_run
from tests.support.marks import extra, full_unless


def run_file(folder: Path, data: Path, **train: Any) -> Path:
    train = {"steps": 2, "global_batch": 4, **train}
    return write_run(folder / "mine.yaml", data, n_layers=2, train=train)


@pytest.mark.parametrize("devices", full_unless(lambda n: n == 2, [1, 2, 4]))
def test_what_is_emitted_trains_as_it_is(token_folder: Path, tmp_path: Path, devices: int) -> None:
    mine, emitted = run_file(tmp_path, token_folder), tmp_path / "best.yaml"
    options = ["--cluster", "dgx-h100", "--devices", devices, "--top", 2, "--emit", emitted]
    options += ["--also", f"layout.dp={devices} train.recompute=full"]
    planned = gridformer_here("plan", mine, *map(str, options), "--json")
    assert planned.returncode == 0, planned.stderr
    found, run = json.loads(planned.stdout), load_run(emitted)
    best, (given,) = found["layouts"][0], [one for one in found["layouts"] if one["asked"]]
    assert 1 <= given["place"] <= found["traced"]
    assert given["train"]["recompute"] == "full"
    assert given["fits"]
    assert run.layout.n_processes == devices
    assert all(getattr(run.layout, key) == value for key, value in best["layout"].items())
    out = tmp_path / "out"
    trained = gridformer_here("train", emitted, "--out", out)
    assert trained.returncode == 0, trained.stderr
    assert [one["step"] for one in read_metrics(out) if "loss" in one] == [1, 2]


def test_what_is_emitted_names_the_command_that_makes_it_again(
    token_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = run_file(tmp_path, token_folder).rename(tmp_path / "my run.yaml").name
    words = ["plan", mine, "name=a b", "train.loggers=[tensorboard]", "--cluster", "dgx-h100"]
    words += ["--devices", "2", "--batch", "8", "--top", "1", "--emit", "the best.yaml"]
    assert gridformer_here(*words).returncode == 0
    first, _ = Path("the best.yaml").read_text().split("\n", 1)
    program, *again = shlex.split(first.partition("written by: ")[2])
    assert program == "gridformer"
    assert sorted(again) == sorted(words)
    assert load_run("the best.yaml").train.global_batch == 8


def test_a_run_file_is_written_for_a_reader_that_has_gone(
    token_folder: Path, tmp_path: Path
) -> None:
    mine, emitted = run_file(tmp_path, token_folder), tmp_path / "best.yaml"
    options = ["--cluster", "dgx-h100", "--devices", "2", "--top", "1", "--emit", str(emitted)]
    command = [sys.executable, "-m", "gridformer", "plan", str(mine), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path) as planning:
        assert planning.stdout is not None
        planning.stdout.close()  # like `| head` after its last line
        planning.wait(240)
    assert load_run(emitted).layout.n_processes == 2


def test_the_batch_and_the_devices_of_a_plan() -> None:
    """A model gets half a million tokens a step, unless a setting or --batch says otherwise."""
    cluster = load_cluster("dgx-h100")

    def batch(*overrides: str, devices: int = 8, asked: int = 0) -> int:
        run = planned_run("gpt2-124m", [*overrides], cluster, devices, asked, [])
        return run.train.global_batch

    assert batch() == 512
    assert batch("train.global_batch=16") == 16
    assert batch("train.global_batch=16", asked=32) == 32
    with pytest.raises(UserError, match=f"has at most {cluster.size:,} devices"):
        batch(devices=cluster.size + 1)


def test_a_report_is_written_where_nothing_fits(token_folder: Path, tmp_path: Path) -> None:
    extra("plotly")
    report = tmp_path / "report.html"
    model = ("plan", "gpt-175b", "model.vocab_size=51200", "--batch", "8", "--devices", "8")
    done = gridformer_here(*model, "--cluster", "dgx-h100", "--html", report)
    assert done.returncode == 1
    assert "Nothing fits on 8 devices of dgx-h100." in done.stdout
    assert str(report) in done.stdout.replace("\n", "")
    assert "Nothing fits" in report.read_text(encoding="utf-8")
