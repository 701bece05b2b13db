"""The script that measures a machine, run with a Python that only writes down how it is called.

It makes environments whose Python is a copy of itself. A file `broken` lets pip and calibrate fail,
`slow` lets tests hang, and `cuda` says that there is a GPU.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.launch.programs import ROOT
from tests.support.marks import full_unless

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


FILES = ("", "cuda", "broken", "slow")
PARTS = "pytest pytest pytest single single single calibrate predicted tiles".split()  # noqa: SIM905


@pytest.mark.parametrize("file", full_unless(lambda file: file in ("", "slow"), FILES))
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
