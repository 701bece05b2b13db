"""The table of published numbers that nothing is fitted to, and the page that it stands on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.planner.apart import apart_lines, mean_error, winner_lines
from benchmarks.planner.deepspeed import of_deepspeed
from benchmarks.planner.held_out import SUPER, SUPER_OWN, WEAK, Found, same_winner
from benchmarks.planner.page import fill, marked

from gridformer.trace.events import Event, Kernel, Place, Start, Trace, Wait

PLACE = Place("", 0, "", "layers.0")


def found(group: str, ratio: float, right: bool | None = None) -> Found:
    return Found(group, f"{group} {ratio}", "lassen-v100", 2.0, "x", 2.0 * ratio, "paper", right)


def test_winners_count_only_where_the_published_gap_is_clear() -> None:
    assert same_winner(1.04, 0.5) is None
    assert same_winner(0.96, 2.0) is None
    assert same_winner(2.22, 3.24)
    assert same_winner(2.22, 0.97) is False
    assert same_winner(0.5, 0.9)


def test_means_with_and_without_each_group_and_missed_winners() -> None:
    rows = [found(SUPER, 1.5, True), found(SUPER_OWN, 0.5, False), found(WEAK, 0.9)]
    assert mean_error(rows, lambda one: one.group != SUPER_OWN)[0] == pytest.approx(0.3)
    text = "\n".join(apart_lines(rows))
    assert "| each published number once, what is simulated included | 2 | 30.0% | **no** |" in text
    assert "| the same without SUPER | 1 | 10.0% | yes |" in text
    assert "| gridformer's own code in the place of what is simulated | 2 | 30.0% |" in text
    ours = winner_lines(rows)[-1]
    assert "0 of 1" in ours
    assert SUPER_OWN in ours


def _trace() -> Trace:
    """A layer of h=8 that is gathered while a kernel runs, and a sum of gradients."""
    numel = 12 * 64 + 13 * 8
    gather = Start(1, "all_gather", "g", (0, 1), PLACE, "dp", "parameters", numel // 2, "float16")
    sums = replace(gather, number=2, op="reduce_scatter", label="gradients", dtype="float32")
    other = replace(gather, number=3, op="all_reduce", axis="world", label="metrics", size=3)
    kernel = Kernel("mm", "product", (1, 8, 8, 8), "float16", 1024, 384, PLACE)
    events: list[Event] = [gather, kernel, Wait(1, PLACE), sums, kernel, Wait(2, PLACE)]
    return Trace(0, events=[*events, other, Wait(3, PLACE)], update=6)


def test_deepspeed_of_2021_hides_no_message_and_gathers_each_parameter_by_itself() -> None:
    trace = of_deepspeed(_trace(), 8)
    starts = [one for one in trace.events if isinstance(one, Start)]
    gathers = [one for one in starts if one.op == "all_gather"]
    assert sorted(one.size for one in gathers) == sorted(
        size // 2 for size in (8, 8, 8, 8, 192, 24, 64, 8, 256, 32, 256, 8)
    )
    assert len({one.number for one in starts}) == len(starts)
    for number, one in enumerate(trace.events):
        if isinstance(one, Start) and one.axis == "dp":
            assert trace.events[number + 1] == Wait(one.number, one.place)
    assert [one.dtype for one in starts if one.op == "reduce_scatter"] == ["float16"]
    update = trace.events[trace.update]
    assert isinstance(update, Start)
    assert update.op == "all_reduce"


def test_a_page_gets_the_table_where_it_is_marked(tmp_path: Path) -> None:
    begin, end = marked("held-out")
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{begin}\nold\n{end}\n\nafter\n")
    fill(page, "held-out", ["| new |"])
    fill(page, "held-out", ["| newer |"])
    assert page.read_text() == f"before\n\n{begin}\n\n| newer |\n\n{end}\n\nafter\n"
    with pytest.raises(ValueError, match="has no"):
        fill(page, "selene-a100", [])


def test_planners_page_has_a_place_for_each_table() -> None:
    text = Path("docs/results/planner.md").read_text(encoding="utf-8")
    for name in ("frontera-rtx5000", "selene-a100", "dgx-h100", "held-out"):
        assert all(one in text for one in marked(name)), name
