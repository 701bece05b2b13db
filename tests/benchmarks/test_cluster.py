"""The report on a cluster: its layouts, its measure of overlap, and the whole of it on CPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from benchmarks.gpu import cluster
from benchmarks.gpu.layouts import layouts_of
from benchmarks.gpu.overlap import Span, covered, overlap_of
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gridformer.config import LayoutConfig
from tests.support.launch.programs import ROOT

SCRIPTS = ROOT / "benchmarks" / "gpu"
spans = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda x: (float(x[0]), float(sum(x))))
)


# --------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
def test_every_layout_uses_all_devices_and_is_valid(n: int) -> None:
    for quick in (True, False):
        options = cluster.Options("megatron-1.2b", 4, 3, (), 0.0, Path(), "cpu", quick)
        for title, layout in layouts_of(n).items():
            assert LayoutConfig(**layout).n_processes == n, title
            if n <= 8 or not quick:
                cluster._run_of(layout, options)  # which checks it


def test_a_number_of_devices_that_layouts_cannot_use_is_refused() -> None:
    with pytest.raises(ValueError, match=r"6 devices: .* 2, 4 or a multiple of 8"):
        layouts_of(6)


# --------------------------------------------------------------------------- overlap


@given(spans, spans)
def test_overlap_is_that_of_single_ticks(computing: list[Span], communicating: list[Span]) -> None:
    """Time spans have whole microseconds here, so that they can be counted one by one."""

    def ticks(some: list[Span]) -> set[int]:
        return {t for begin, end in some for t in range(int(begin), int(end))}

    found = overlap_of(computing, communicating)
    busy, sending = ticks(computing), ticks(communicating)
    assert round(found.computing_s * 1e6) == len(busy) == covered(computing)
    assert round(found.communicating_s * 1e6) == len(sending)
    assert round(found.exposed_s * 1e6) == len(sending - busy)
    if sending:
        assert found.hidden == pytest.approx(1 - len(sending - busy) / len(sending))
    else:
        assert math.isnan(found.hidden)


# --------------------------------------------------------------------------- the report


def test_a_report_of_two_processes(tmp_path: Path) -> None:
    out, title = tmp_path / "report.md", "optimus 2x1, auto"
    words = ["-m", "benchmarks.gpu.cluster", "--device", "cpu", "--quick", "--processes", "2"]
    done = subprocess.run(
        [sys.executable, *words, "--only", title, "--out", str(out)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    text = out.read_text(encoding="utf-8")
    assert text.strip() == done.stdout.strip()
    exact, fast = [line for line in text.splitlines() if line.startswith(f"| {title} |")]
    assert exact.endswith("| equal |")
    cells = [cell.strip() for cell in fast.strip("|").split("|")]
    assert len(cells) == len(cluster.COLUMNS)
    assert float(cells[2].split()[0]) > 0
    assert float(cells[7]) >= 0


def test_bad_input_is_refused_before_anything_starts(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(cluster.main)
    for words, said in (
        (["--processes", "4", "--only", "optimus"], "--only optimus is none of: megatron 1x4"),
        (["--processes", "5"], "5 devices"),
        (["--processes", "4", "--model", "gpt-5"], "gpt-5"),
    ):
        found = CliRunner().invoke(app, ["--device", "cpu", *words])
        assert found.exit_code == 2, words
        assert said in found.output


@pytest.mark.parametrize("name", ["one_machine.sh", "four_machines.sh"])
def test_scripts_are_valid(name: str) -> None:
    assert subprocess.run(["bash", "-n", SCRIPTS / name], check=False).returncode == 0


def test_a_script_without_arguments_says_how_to_start_it() -> None:
    script = SCRIPTS / "four_machines.sh"
    done = subprocess.run([script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "FIRST_HOST RANK" in done.stderr
