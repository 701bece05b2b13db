"""The benchmark of sub-graphs: its cases, and its report on known numbers."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer
from benchmarks.common.machine import describe_machine
from benchmarks.subgraph import __main__ as subgraph
from benchmarks.subgraph.cases import Case, all_cases, variants
from benchmarks.subgraph.report import plot, report
from typer.testing import CliRunner

from gridformer.utils.process import running


def measured(case: Case, dp: float, other: float) -> dict[str, Any]:
    """Return a case's line, in which data parallelism takes `dp` seconds and the others `other`."""
    rows = [
        {
            "name": variant.name,
            "title": variant.title,
            "seconds": [dp if variant.name == "dp" else other] * 3,
            "collectives": {"all_reduce": 2},
            **{"messages": 8, "moved": 3e6, "moved_gradients": 1e6},
            **{"parameters": 2 << 20, "states": 8 << 20, "peak": 16 << 20},
        }
        for variant in variants(case.processes)
    ]
    names = ("date", "cpu", "cores", "torch", "python", "commit", "command")
    return {"case": asdict(case), "rounds": 3, "rows": rows, "machine": dict.fromkeys(names, "-")}


def test_variants_fill_the_processes() -> None:
    for processes, g in ((2, [2]), (4, [2, 4]), (8, [2, 4, 8])):
        found = variants(processes)
        assert {v.layout.n_processes for v in found} == {processes}
        assert sorted({v.layout.branches for v in found[1:]}) == g
        for v in found:
            outside = v.layout.attention == "outside" and v.layout.feed_forward == "common"
            assert outside == ("the paper's" in v.title), "slice and concat, heads alone branched"
        assert sum("the paper's" in v.title for v in found) == len(g)
        for case in all_cases(processes, ["transformer", "t5-large"]):
            assert case.heads % g[-1] == 0
            assert case.model().head_width * case.heads == case.hidden


def test_report_and_plot_of_known_numbers(tmp_path: Path) -> None:
    cases = [Case("transformer", "per-head", heads, 1, 4) for heads in (8, 16)]
    found = {case.key: measured(case, 0.3, 0.2) for case in cases}
    text = report(found)
    assert "Transformer base (h=512), 1 sample a process, 4 processes" in text
    assert "| data parallel, ms | 300 | 300 |" in text
    assert text.count("| D&SP, g=4 | 1.50 | 1.50 |") == 1
    assert "| D&SP, g=4 | 200 [200, 200] | 1.50 | 2 | 8 | 3.00 | 1.00 | 2.0 | 8.0 | 16.0 |" in text
    assert "| D&SP of heads, slice and concat (the paper's), g=4 | 1.50 | 1.50 |" in text
    assert "**The paper's\nvariant** (SUPER" in text
    plot(found, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="4 processes and two numbers of heads"):
        plot({}, tmp_path / "none.png")


def test_8_heads_of_the_transformer_are_measured_once_and_in_both_sweeps() -> None:
    per_head, total = (Case("transformer", sweep, 8, 1, 4) for sweep in ("per-head", "total"))
    assert per_head.model() == total.model()
    assert per_head.key == total.key
    keys = [case.key for case in all_cases(4, ["transformer", "t5-large"])]
    assert len(keys) - len({*keys}) == 2, "with 1 and with 4 samples a process"
    text = report({total.key: measured(total, 0.3, 0.2)})
    assert "|  | work per head fixed | total work fixed |" in text
    assert "| D&SP, g=4 | 1.50 | 1.50 |" in text


def test_what_cannot_be_plotted_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Case] = []
    monkeypatch.setattr(subgraph, "_measure", lambda cases, *_: asked.extend(cases))
    words = ["--out", str(tmp_path / "none.jsonl"), "--plot", str(tmp_path / "none.png")]
    runner, app = CliRunner(), typer.Typer()
    app.command()(subgraph.main)
    for more in (["--processes", "2"], ["--heads", "8"]):
        done = runner.invoke(app, [*words, *more])
        assert (done.exit_code, asked) == (2, []), more
        assert "nothing to plot" in done.output
    runner.invoke(app, [*words[:2], "--processes", "4", "--heads", "8,16"])
    assert len(asked) == 10, "both shapes and sweeps, without the two that are there twice"
    assert len({case.key for case in asked}) == 10


def test_a_busy_machine_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case("transformer", "total", 8, 1, 4)
    for load, busy in ((0.2, False), (7.0, True)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        monkeypatch.setattr("benchmarks.common.machine.BUSY", running())
        machine = describe_machine("benchmarks.subgraph")
        assert ("this machine is busy" in capsys.readouterr().err) == busy
        text = report({case.key: measured(case, 0.3, 0.2) | {"machine": machine}})
        assert ("When it began, 7.0 processes were running" in text) == busy


def test_a_case_without_the_newest_variant_is_measured_again(tmp_path: Path) -> None:
    values = measured(Case("transformer", "total", 8, 1, 4), 0.3, 0.2)
    out = tmp_path / "found.jsonl"
    out.write_text(json.dumps(values) + "\n")
    assert len(subgraph.read(out)) == 1
    values["rows"] = [row for row in values["rows"] if not row["name"].startswith("paper")]
    out.write_text(json.dumps(values) + "\n")
    assert subgraph.read(out) == {}
