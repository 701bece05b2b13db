"""The scripts that measure machines, run with a Python that only writes down how it is called.

It makes environments whose Python is a copy of itself. A file `broken` lets pip fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.launch.programs import ROOT

SCRIPTS = ROOT / "benchmarks" / "gpu"
PYTHON = r"""#!/usr/bin/env bash
echo "$0 $*" >> calls
case "$*" in
  -c*) echo "$0 3.11" ;;
  *"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *"-m pip"*) sleep 0.3; [ ! -e broken ] ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the scripts and a fake interpreter, `python`."""
    shutil.copytree(SCRIPTS, tmp_path / "benchmarks" / "gpu")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    fake(tmp_path / "python", PYTHON)
    return tmp_path


def fake(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def begin(
    checkout: Path, script: str, *words: str, python: str = "python"
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [checkout / "benchmarks" / "gpu" / script, *words],
        env={**os.environ, "PYTHON": str(checkout / python), "PATH": path_of(checkout)},
        stderr=subprocess.PIPE,
        text=True,
    )


def path_of(checkout: Path) -> str:
    return f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}"


def end(process: subprocess.Popen[str]) -> int:
    _, err = process.communicate(timeout=120)
    print(err)
    return process.returncode


def calls(checkout: Path, what: str) -> list[str]:
    """Return the calls of Python that contain some words, in order."""
    lines = (checkout / "calls").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if what in line]


def test_one_machine_installs_once_and_measures(checkout: Path) -> None:
    for _ in range(2):
        assert end(begin(checkout, "one_machine.sh", "--model", "megatron-2.5b")) == 0
    (install,) = calls(checkout, "-m pip")
    assert install.endswith("install --quiet torch>=2.11 ."), "and nothing that it does not need"
    measured = calls(checkout, "benchmarks.gpu.cluster")
    words = "-m benchmarks.gpu.cluster --out report.md --model megatron-2.5b"
    assert measured == [f".venv-gpu/bin/python {words}"] * 2


def test_what_was_not_installed_is_installed_by_the_next_start(checkout: Path) -> None:
    (checkout / "broken").touch()
    assert end(begin(checkout, "one_machine.sh")) != 0
    assert not calls(checkout, "benchmarks.gpu.cluster")
    (checkout / "broken").unlink()
    assert end(begin(checkout, "one_machine.sh")) == 0
    assert len(calls(checkout, "-m pip")) == 2
    assert len(calls(checkout, "benchmarks.gpu.cluster")) == 1


@pytest.mark.parametrize("changed", ["python", "dependencies"])
def test_another_python_or_other_dependencies_make_a_new_environment(
    checkout: Path, changed: str
) -> None:
    assert end(begin(checkout, "one_machine.sh")) == 0
    python = "python"
    if changed == "python":
        python = "python-2"
        fake(checkout / python, PYTHON)
    else:
        with (checkout / "pyproject.toml").open("a", encoding="utf-8") as file:
            file.write("# changed\n")
    (checkout / ".venv-gpu" / "old").touch()
    assert end(begin(checkout, "one_machine.sh", python=python)) == 0
    assert not (checkout / ".venv-gpu" / "old").exists()
    assert len(calls(checkout, "-m pip")) == 2


def test_machines_that_share_a_checkout_make_one_environment(checkout: Path) -> None:
    started = [begin(checkout, "four_machines.sh", "first", str(rank)) for rank in range(4)]
    assert [end(process) for process in started] == [0] * 4
    assert len(calls(checkout, "-m venv")) == 1
    assert len(calls(checkout, "-m pip")) == 1
    measured = calls(checkout, "benchmarks.gpu.cluster")
    assert sorted(line.split("--node-rank ")[1][0] for line in measured) == ["0", "1", "2", "3"]
    for line in measured:
        assert line.startswith(".venv-gpu/bin/python -m torch.distributed.run --nnodes 4 ")
        assert "--nproc-per-node 8 --master-addr first --master-port 29500 -m" in line
    both = calls(checkout, "-m ")
    assert both.index(calls(checkout, "-m pip")[0]) < both.index(measured[0])


def test_machines_that_cannot_lock_have_environments_of_their_own(checkout: Path) -> None:
    (checkout / "bin").mkdir()
    fake(checkout / "bin" / "flock", "#!/bin/sh\nexit 1\n")
    assert end(begin(checkout, "four_machines.sh", "first", "0")) == 0
    (measured,) = calls(checkout, "benchmarks.gpu.cluster")
    assert measured.startswith(f".venv-gpu-{os.uname().nodename}/bin/python ")


def test_a_script_without_arguments_says_how_to_start_it(checkout: Path) -> None:
    script = checkout / "benchmarks" / "gpu" / "four_machines.sh"
    done = subprocess.run([script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "FIRST_HOST RANK" in done.stderr
    assert "--exclusive --gpus-per-node 8 --cpus-per-task" in done.stderr
    assert done.stderr.rstrip().endswith("network.")
    assert not (checkout / "calls").exists()
