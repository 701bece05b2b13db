"""The report on a cluster: its layouts, its measure of overlap, and the whole of it on CPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from benchmarks.gpu import cluster, numerics
from benchmarks.gpu.layouts import layouts_of
from benchmarks.gpu.overlap import Span, covered, overlap_of
from benchmarks.gpu.release import groups, released
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gridformer.config import LayoutConfig
from gridformer.mesh.process_group import World
from gridformer.utils.errors import UserError
from tests.support.launch.programs import ROOT
from tests.support.multirank.pool import WorkerPool

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
    with pytest.raises(ValueError, match=r"6 devices: .* a multiple of 8; use --processes 4$"):
        layouts_of(6)
    with pytest.raises(ValueError, match=r"1 devices: .* a multiple of 8$"):
        layouts_of(1)


@pytest.mark.parametrize(("found", "used"), [(8, 8), (6, 4), (3, 2), (9, 8)])
def test_as_many_gpus_are_used_as_layouts_can(
    found: int, used: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    assert cluster._n_devices("cuda") == used
    assert layouts_of(used)
    said = capsys.readouterr().err
    assert said.startswith(f"{found} GPUs were found, and {used} of them are used") == (
        found > used
    )


def test_one_gpu_is_measured_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"python -m benchmarks\.gpu"):
        cluster._n_devices("cuda")


def test_what_bits_depend_on_is_set_before_a_gpu_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def joins(*_: Any) -> None:
        raise UserError(f"numerics were set {len(seen)} times before")

    monkeypatch.setattr(cluster, "set_numerics", seen.append)
    monkeypatch.setattr(cluster, "init_process_groups", joins)
    with pytest.raises(UserError, match="1 times"):
        cluster.work(2, quick_options(2, tmp_path))
    assert not seen[0].tf32


# --------------------------------------------------------------------------- what a layout leaves


def quick_options(n: int, out: Path) -> cluster.Options:
    return cluster.Options("a tiny GPT-2", n, 2, (), 0.0, out, "cpu", True)


def test_models_do_not_outlive_the_measurement_of_their_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that is full with one layout's model has no room for that of the next."""
    models: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watched(module: Any) -> None:
        real = module.build_parallel

        def build(*args: Any, **more: Any) -> Any:
            alive.append(sum(ref() is not None for ref in models))
            model = real(*args, **more)
            models.append(weakref.ref(model))
            return model

        monkeypatch.setattr(module, "build_parallel", build)

    watched(cluster)
    watched(cluster.numerics)
    monkeypatch.setattr(cluster, "_agreed", lambda run, world: (run, 0.0))
    world = World(0, 0, 1, torch.device("cpu"), "none", "")
    layouts: dict[str, dict[str, Any]] = {"a": {}, "b": {"micro_batches": 2}}
    options = quick_options(1, tmp_path / "report.md")
    writer = cluster.Writer(world, options.out)
    cluster.exactness(world, layouts, options, writer)
    cluster.speed(world, layouts, options, writer)
    # For each layout and type exactness compares two models, of which the first is alive then.
    assert alive == [0, 1] * 4 + [0, 0]


def groups_left(layout: dict[str, Any]) -> tuple[int, int]:
    """Return how many groups of a rank a layout makes, and how many it leaves behind."""
    before = len(groups())
    with released(torch.device("cpu")):
        numerics.differences("cpu", layout, numerics.model_of(True), "float32", 8)
        made = len(groups()) - before
    return made, len(groups()) - before


def test_groups_do_not_outlive_the_measurement_of_their_layout(pool: WorkerPool) -> None:
    layout = {"scheme": "megatron", "cols": 2, "pp": 2, "micro_batches": 2}
    for made, left in pool.run(4, groups_left, layout):
        assert made >= 2
        assert left == 0


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


@pytest.mark.full
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
