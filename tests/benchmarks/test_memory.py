"""The memory benchmark: the limits it finds, and its report on known numbers."""

from pathlib import Path
from typing import Any

import pytest
import typer
from benchmarks.memory import __main__ as memory
from benchmarks.memory.cases import HYBRID, METHODS, SCALINGS, Scaling, schemes
from benchmarks.memory.report import plot, report

from gridformer.memory.estimate import estimate_rank

MACHINE = dict.fromkeys(("date", "cpu", "cores", "torch", "commit", "command"), "-")


def line(case: list[Any], found: Any) -> dict[str, Any]:
    return {"case": case, "found": found, "machine": MACHINE}


def limit(batch: int, measured: int | None = None) -> dict[str, Any]:
    found = {"batch": batch, "unit": 1, "peak": 11_000_000, "more": 12_500_000, "states": 1}
    return {**found, "measured": measured, "measured_more": 12_600_000}


def test_schemes_fill_the_processes_and_what_does_not_divide_is_left_out() -> None:
    assert all({*one.widths} == {1, 4, 9, 16, 36, 64} for one in SCALINGS.values())
    for processes in SCALINGS["paper"].widths:
        assert {layout.n_processes for layout in schemes(processes).values()} == {processes}
        for name in SCALINGS:
            left_out = [t for t in schemes(processes) if not memory._divides(name, processes, t)]
            cut_s = ["megatron, sequence parallel", "megatron 2-D"]
            odd = {9: (3,), 36: (3, 6, 9, 12, 18)}  # columns that do not divide s
            hybrids = [HYBRID.replace("1xc", f"1x{c}") for c in odd.get(processes, ())]
            assert left_out == (cut_s + hybrids if processes in odd else [])


def test_a_plot_of_nothing_is_refused_before_anything_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_jobs", lambda *_: pytest.fail("it began"))
    with pytest.raises(typer.BadParameter, match="nothing to plot"):
        memory.main(tmp_path / "o", parts="shares,price", quick=True, picture=tmp_path / "p.png")


def test_an_equal_batch_is_that_of_optimus_or_the_next_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny = Scaling("tiny", "", {4: (16, 4)}, 1, 8, 50, 400_000)
    monkeypatch.setitem(SCALINGS, "tiny", tiny)
    found = [line(["limit", "tiny", 4, "optimus, auto"], limit(10))]
    of_optimus = memory._equal("tiny", 4, "optimus, auto", found)
    assert of_optimus["batch"] == 10
    of_fsdp = memory._equal("tiny", 4, "FSDP", found)
    assert of_fsdp["batch"] == 8, "a multiple of its 4 replicas"
    assert of_fsdp["peak"] == estimate_rank(tiny.run(schemes(4)["FSDP"], 8), 0).peak


def test_report_and_plot_of_known_numbers(tmp_path: Path) -> None:
    prices = [
        {"layout": "one device", "method": name, "seconds": [0.2 + i / 10] * 3, "flops": 2e9}
        for i, name in enumerate(METHODS)
    ]
    limits = {
        (1, "one device"): limit(9, 11_000_000),
        (4, "megatron"): limit(20, 10_000_000),
        (4, "optimus, auto"): limit(50),
        (4, "FSDP"): limit(40),
        (16, HYBRID.replace("1xc", "1x2")): limit(64),
        (16, HYBRID.replace("1xc", "1x4")): limit(72),
    }
    equal = {"optimus, auto": (74, 11), "FSDP": (64, 30)}
    equal |= {HYBRID.replace("1xc", "1x2"): (72, 13), HYBRID.replace("1xc", "1x4"): (72, 12)}
    found = [line(["limit", "small", *case], value) for case, value in limits.items()]
    found += [
        line(["equal", "small", 16, title], {"batch": batch, "peak": gb * 10**9})
        for title, (batch, gb) in equal.items()
    ]
    found += [
        line(["share", "small", 4, "none"], {"megatron": 1.4, "optimus, auto": 0.98}),
        line(["price", "one device"], prices),
    ]
    text = report(found)
    assert "| megatron |  | 20 |  |" in text
    assert "| optimus, auto |  | 50 (2.5x) |  |" in text
    assert "| FSDP |  | 40 (2.0x) |  |" in text
    assert f"| {HYBRID} |  |  | 72, c = 4 |" in text
    assert "| GB a process | p = 16, b = 74 |" in text
    assert "| FSDP | 30.0 (64) |" in text
    assert f"| {HYBRID} | 12.0 (72), c = 4 |" in text
    assert "| p = 16 | 13.0 | 12.0 |" in text
    assert "| megatron, p = 4 | 20 | 11.00 | 10.00 | +10.0% | 12.50 | 12.60 |" in text
    assert "| optimus, auto | 0.98 |" in text
    assert "| `loss in parts of 256 tokens` | 300 | 1.50 | 1.00 | 1.50 |" in text
    plot(found, tmp_path / "limits.png")
    assert (tmp_path / "limits.png").stat().st_size > 10_000
