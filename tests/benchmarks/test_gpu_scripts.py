"""The script that measures a machine, run with a Python that only writes down how it is called."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.launch.programs import ROOT

PYTHON = r"""#!/usr/bin/env bash
echo "$0 $*" >> calls
case "$*" in
  -c*) [ -e slow ] || echo cuda; echo "$0 3.11" ;;
  *"-m pytest"*) [ ! -e slow ] || { trap '' TERM; exec sleep 60; } ;;
  *"gridformer calibrate"*) exit 1 ;;
  *"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
"""
PARTS = "pytest pytest pytest single single single calibrate predicted tiles".split()  # noqa: SIM905


@pytest.mark.parametrize("slow", [False, True])
def test_a_quarter_of_an_hour_has_all_parts_in_their_order(tmp_path: Path, slow: bool) -> None:
    """A part that fails is named, and one that hangs is killed, so that the whole ends in time."""
    scripts, python = tmp_path / "benchmarks" / "gpu", tmp_path / "python"
    shutil.copytree(ROOT / "benchmarks" / "gpu", scripts)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    python.write_text(PYTHON, encoding="utf-8")
    python.chmod(0o755)
    (tmp_path / ("slow" if slow else "fast")).touch()
    settings = {"PYTHON": str(python), "SECONDS_IN_ALL": "10" if slow else "480"}
    command = [scripts / "quarter_hour.sh", tmp_path / "out"]
    subprocess.run(command, env=os.environ | settings, check=True, timeout=50)
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    words = [line.replace(".", " ").split() for line in calls if "-m " in line]
    parts = [next(word for word in line if word in PARTS) for line in words]
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert ("A rehearsal" in report) == slow
    if slow:
        assert (parts, "**kernels was cut** after" in report) == (["pytest"], True)
        assert report.count("was left out:** no time was left") == len(PARTS) - 1
        return
    assert parts == PARTS
    assert "**calibrate failed** with exit code 1" in report
    assert "--cluster dgx-h100 " in next(line for line in calls if "predicted" in line)
    limits = [int(line.split()[4]) for line in report.splitlines() if line.startswith("<!-- ")]
    assert sum(limits[:-1]) < 450 < limits[-1] <= 480, "what is left is for the last part"
