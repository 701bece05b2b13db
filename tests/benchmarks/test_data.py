"""The pages of benchmarks.data have a row for each figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.data.__main__ import bar_column, column, page, phase_column
from benchmarks.data.readers import GROWING, TIMES, WAYS, WHAT
from benchmarks.data.readers import page as readers_page
from benchmarks.data.training import TracedStep, Watched, traced_step

from gridformer.train.trace import merged_trace


def test_the_page_shows_what_was_measured() -> None:
    parts = dict.fromkeys(("open", "check", "fingerprint", "order", "first batch"), 0.25)
    found = {"parts": parts, "processor_s": 0.5, "wall": [0.01, 0.03], "processor": [0.002, 0.002]}
    watched = Watched(
        processor_s=3.0,
        first_step_s=2.0,
        anonymous=[(2, 100.0), (19, 120.0)],
        waits=[0.5, 0.0, 0.1],
        steps_s=[1.0, 1.0, 1.0],
        traced=TracedStep(10, 0.25, 800.0),
    )
    bars = bar_column(found, watched, 20)
    starts = phase_column({"first": (1.0, 2.0), "then": (0.25, 0.5)})
    shown = "\n".join(page({10**6: bars}, {10**6: column(found, watched, 20)}, {10**6: starts}))
    for row in (
        "| start up to the first batch, s (must be below 5) | 1.25 |",
        "| of this, processor time, s | 0.5 |",
        "in the trace of step 10, ms (must be a small part of the next row) | 0.25 |",
        "| length of that step, ms | 800 |",
        "| the slowest of 200 batches, ms | 30 |",
        "| `data_wait_s` of the first step, ms | 500 |",
        "| the longest of these, ms | 100 |",
        "| their share of the time of these steps, % | 5 |",
        "| memory after a tenth of the steps, MiB | 100 |",
        "| memory at the end, MiB (must not grow) | 120 |",
        "| then | 0.25 (0.50) |",
        "| until the first step is over | 1.25 (2.50) |",
    ):
        assert row in shown


def test_the_wait_for_data_is_that_of_the_trace(tmp_path: Path) -> None:
    """Of two processes, the second waits 7 ms of a step of 100 ms."""
    parts: list[dict[str, Any]] = []
    for wait in (0.002, 0.007):
        read = [
            ["wait for data", -1, -1, 50.001, 50.001 + wait],
            ["read the batch", -1, -1, 50.0, 50.01],
        ]
        events = [*read, ["forward", 0, 0, 50.02, 50.1]]
        parts.append({"host": "a", "zero": 50.0, "place": {}, "events": events, "messages": []})
    path = tmp_path / "trace-step-3.json"
    path.write_text(json.dumps(merged_trace(parts)))
    found = traced_step(path)
    assert found.step == 3
    assert found.wait_ms == pytest.approx(7.0)
    assert found.length_ms == pytest.approx(100.0)
    del parts[0]["events"][0]
    path.write_text(json.dumps(merged_trace(parts)))
    with pytest.raises(ValueError, match="no row `wait for data` for every process"):
        traced_step(path)


def test_the_page_of_readers_shows_both_ways() -> None:
    one = {"used_s": 1.5, "with_start_s": 3.0, "peak_mib": 50.0, "error": "", "cached": 0}
    other = {**one, "used_s": 2.5, "cached": 5e6}
    found = {(what, way): one if way == "gridformer" else other for what in WHAT for way in WAYS}
    larger = {  # 2 s, and a second for each million bytes
        (n * 10**6, what, way): {**one, "used_s": 2.0 + n}
        for n in TIMES
        for what in GROWING
        for way in WAYS
    }
    shown = "\n".join(readers_page(found, 10**6, larger))
    assert "| a text file | gridformer | 1.50 | 50 |  |" in shown
    assert "| a text file | datasets | 2.50 | 50 | 5 MB in its cache |" in shown
    assert shown.count("| 3.00 |") == 2
    sizes = " | ".join(f"{2.0 + n:.2f} s, 50 MiB" for n in TIMES)
    assert f"| a text file | datasets | {sizes} | 2.00 s | 100.00 s |" in shown
