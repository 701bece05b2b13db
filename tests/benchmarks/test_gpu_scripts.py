"""The scripts that measure machines, run with a Python that only writes down how it is called.

It makes environments whose Python is a copy of itself. A file `broken` lets pip and calibrate fail,
`slow` lets tests hang, and `cuda` says that there is a GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.launch.programs import ROOT

SCRIPTS = ROOT / "benchmarks" / "gpu"
PYTHON = r"""#!/usr/bin/env bash
echo "$0 $*" >> calls
case "$*" in
  -c*) [ -e cuda ] && echo cuda; echo "$0 3.11" ;;
  *"-m pytest"*) [ ! -e slow ] || { trap '' TERM; exec sleep 60; } ;;
  *"gridformer calibrate"*) [ ! -e broken ] ;;
  *"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *"-m pip"*) sleep 0.3; [ ! -e broken ] ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the scripts and a fake interpreter, `python`."""
    shutil.copytree(SCRIPTS, tmp_path / "benchmarks" / "gpu")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    python = tmp_path / "python"
    python.write_text(PYTHON, encoding="utf-8")
    python.chmod(0o755)
    return tmp_path


def begin(checkout: Path, script: str, *words: str, seconds: int = 480) -> subprocess.Popen[bytes]:
    settings = {"PYTHON": str(checkout / "python"), "SECONDS_IN_ALL": str(seconds)}
    command: list[str | Path] = [checkout / "benchmarks" / "gpu" / script, *words]
    return subprocess.Popen(command, env=os.environ | settings)


def calls(checkout: Path, what: str) -> list[str]:
    """Return the calls of Python that contain some words, in order."""
    lines = (checkout / "calls").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if what in line]


def test_one_machine_installs_once_and_measures(checkout: Path) -> None:
    for _ in range(2):
        assert begin(checkout, "one_machine.sh", "--model", "megatron-2.5b").wait(120) == 0
    (install,) = calls(checkout, "-m pip")
    assert install.endswith("install --quiet torch>=2.11 ."), "and nothing that it does not need"
    measured = calls(checkout, "benchmarks.gpu.cluster")
    words = "-m benchmarks.gpu.cluster --out report.md --model megatron-2.5b"
    assert measured == [f".venv-gpu/bin/python {words}"] * 2


def test_machines_that_share_a_checkout_make_one_environment(checkout: Path) -> None:
    started = [begin(checkout, "four_machines.sh", "first", str(rank)) for rank in range(4)]
    assert [process.wait(120) for process in started] == [0] * 4
    assert len(calls(checkout, "-m venv")) == 1
    assert len(calls(checkout, "-m pip")) == 1
    measured = calls(checkout, "benchmarks.gpu.cluster")
    assert sorted(line.split("--node-rank ")[1][0] for line in measured) == ["0", "1", "2", "3"]
    for line in measured:
        assert line.startswith(".venv-gpu/bin/python -m torch.distributed.run --nnodes 4 ")
        assert "--nproc-per-node 8 --master-addr first --master-port 29500 -m" in line
    both = calls(checkout, "-m ")
    assert both.index(calls(checkout, "-m pip")[0]) < both.index(measured[0])


PARTS = "pytest pytest pytest single single single calibrate predicted tiles".split()  # noqa: SIM905


@pytest.mark.parametrize("file", ["", "cuda", "broken", "slow"])
def test_a_quarter_of_an_hour_has_all_parts_in_their_order(checkout: Path, file: str) -> None:
    """A part that fails is named, and one that hangs is killed, so that the whole ends in time."""
    if file:
        (checkout / file).touch()
    began, seconds = time.monotonic(), 10 if file == "slow" else 480
    run = begin(checkout, "quarter_hour.sh", str(checkout / "out"), seconds=seconds)
    assert run.wait(120) == 0
    started = [line.replace(".", " ").split() for line in calls(checkout, "-m ")]
    parts = [next(word for word in words if word in PARTS) for words in started]
    report = (checkout / "out" / "report.md").read_text(encoding="utf-8")
    if file == "slow":
        assert time.monotonic() - began < 40, "not the minute for which the part would hang"
        assert parts == ["pytest"]
        assert "**kernels was cut** after" in report
        assert report.count("was left out:** no time was left") == len(PARTS) - 1
        return
    assert parts == PARTS
    assert ("A rehearsal" in report) == (file != "cuda")
    assert ("--model llama-3.2-1b" in str(calls(checkout, "single"))) == (file == "cuda")
    assert ("**calibrate failed** with exit code 1" in report) == (file == "broken")
    assert ("--cluster dgx-h100 " in calls(checkout, "predicted")[0]) or file != "broken"
    limits = [int(line.split()[4]) for line in report.splitlines() if line.startswith("<!-- ")]
    assert sum(limits[:-1]) < 450 < limits[-1] <= 480, "what is left is for the last part"
