"""The soak: what it draws, and how it judges."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from benchmarks.soak.draw import LAYOUTS, Drawn, Fault, draw
from benchmarks.soak.kinds import KINDS
from benchmarks.soak.life import Met
from benchmarks.soak.report import Lived
from benchmarks.soak.weights import difference


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


def test_a_run_is_equal_or_has_a_problem() -> None:
    met = Met(Fault(7, KINDS[2], 3, None, 0.5), "pp=2", 6, "rank 1 (pid 5) was killed", 1, 4, 2)
    run = Lived(Drawn(1, "pp=2", (met.fault,)), False, 2, [met], 0.0, [])
    assert not replace(run, difference=1e-14).all_problems(), "rounding"
    assert replace(run, difference=1e-11).all_problems()
    assert replace(run, difference=None).all_problems()
    assert not replace(run, difference=1e-12, moved=True).all_problems()
    assert replace(run, difference=1e-8, moved=True).all_problems()


def test_weights_differ_by_their_largest_difference() -> None:
    one = {"a": torch.tensor([1.0, 100.0], dtype=torch.float64)}
    assert difference(one, {"a": one["a"].clone()}) == 0.0
    assert difference(one, {"a": one["a"] + torch.tensor([0.0, 1.0])}) == pytest.approx(0.01)
    assert difference(one, {"a": one["a"] * torch.nan}) == float("inf")
    assert difference(one, {"b": one["a"]}) == float("inf")
