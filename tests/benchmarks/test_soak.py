"""The soak: what it draws, and how it judges."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from benchmarks.soak.draw import LAYOUTS, Drawn, Fault, draw
from benchmarks.soak.kinds import KINDS
from benchmarks.soak.life import Met
from benchmarks.soak.report import Lived, page, shortened
from benchmarks.soak.weights import difference

MACHINE = dict.fromkeys(("date", "cpu", "cores", "torch", "commit", "command"), "-")


def test_a_seed_draws_all_kinds_about_equally_often() -> None:
    runs = draw(100, 1)
    faults = [fault for run in runs for fault in run.faults]
    assert sorted(fault.number for fault in faults) == [*range(1, 101)]
    counted = Counter(fault.kind.title for fault in faults)
    assert set(counted.values()) == {6, 7}
    assert len(counted) == len(KINDS)
    for run in runs:
        for fault in run.faults:
            assert LAYOUTS[run.layout][0] > 1 or not fault.kind.needs_workers
            assert fault.starting_s is None or fault.kind.in_starting
    assert draw(100, 1) == runs
    assert draw(100, 2) != runs
    few = KINDS[:3]
    assert {fault.kind for run in draw(9, 1, few) for fault in run.faults} == {*few}


def lived(met: Met, **changed: object) -> Lived:
    run = Lived(Drawn(1, "pp=2", (met.fault,)), False, 2, [met], 0.0, [])
    return replace(run, **changed)  # type: ignore[arg-type]


def test_the_page_tells_what_went_wrong() -> None:
    fault = Fault(7, KINDS[2], 3, None, 0.5)
    met = Met(fault, "pp=2", 6, "rank 1 (pid 5) was killed | by", 1, 4, 2)
    good = "\n\n".join(page([lived(met)], MACHINE, []))
    assert "1 faults in 1 runs, 2 starts, 0 problems." in good
    assert "| SIGKILL of a worker | 1 | 1 | `rank 1 (pid 5) was killed \\| by` | 4 | 2 |" in good
    assert "1 of 1 runs that kept their layout are equal in every bit" in good
    assert "Problems" not in good
    assert lived(met, difference=1e-11).all_problems()
    assert not lived(met, difference=1e-14).all_problems(), "rounding"
    assert not lived(met, difference=1e-12, moved=True).all_problems()
    assert lived(met, difference=1e-8, moved=True).all_problems()
    assert lived(met, difference=None).all_problems()
    met.problems.append("a traceback")
    bad = "\n\n".join(page([lived(met)], MACHINE, ["no space at all"]))
    assert "- fault 7 (SIGKILL of a worker, pp=2): a traceback" in bad
    assert "Left out, since no small disk can be mounted here: no space at all." in bad
    assert shortened("error: /a/b-c/run-3/lock").startswith("error: run-3/lock")


def test_weights_differ_by_their_largest_difference() -> None:
    one = {"a": torch.tensor([1.0, 100.0], dtype=torch.float64)}
    assert difference(one, {"a": one["a"].clone()}) == 0.0
    assert difference(one, {"a": one["a"] + torch.tensor([0.0, 1.0])}) == pytest.approx(0.01)
    assert difference(one, {"a": one["a"] * torch.nan}) == float("inf")
    assert difference(one, {"b": one["a"]}) == float("inf")
