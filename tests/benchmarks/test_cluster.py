"""The report on a cluster: its layouts, its measure of overlap, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import typer
from benchmarks.gpu import cluster
from benchmarks.gpu.layouts import layouts_of
from benchmarks.gpu.overlap import Span, covered, overlap_of
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gridformer.config import LayoutConfig
from gridformer.utils.errors import UserError

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
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"python -m benchmarks\.gpu"):
        cluster._n_devices("cuda")


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
