"""The emulated cluster's groups, its layouts, and what it says where it cannot run."""

from __future__ import annotations

import os

import pytest
from benchmarks.predicted.machine import demo_runs
from benchmarks.predicted.report import Row, error_lines, mean_error
from benchmarks.published import namespaces
from benchmarks.published.cases import PLAN, Machine
from benchmarks.published.emulate import groups_of, patterns, sharers_of

from gridformer.cluster import like_messages, load_cluster
from gridformer.utils.errors import UserError


def test_every_rank_is_in_one_group_of_each_pattern_and_links_are_shared_as_predict_says() -> None:
    machine, cluster = Machine(4, 4, 100), load_cluster("frontera-rtx5000")
    assert cluster.node_size == machine.each
    shared = set()
    for members, distance in patterns(machine):
        groups = groups_of(machine, members, distance)
        assert sorted(rank for group in groups for rank in group) == [*range(machine.n)]
        assert sharers_of(machine, groups) == like_messages(cluster, groups[0], groups)
        shared.add(sharers_of(machine, groups))
    assert shared == {1, 2, 4}


def test_all_layouts_are_valid_and_there_are_enough_of_them() -> None:
    layouts = [layout.run(machine) for machine, several in PLAN.items() for layout in several]
    assert len(layouts) >= 20
    assert {run.model.family for run in layouts} == {"gpt2", "t5", "transformer"}
    assert len({name for name, _ in demo_runs()}) == 12


def test_without_root_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with (
        pytest.raises(UserError, match="need root"),
        namespaces.network(2, 100),
    ):
        pass


def test_the_mean_error_counts_both_directions() -> None:
    rows = [Row("high", 1.2, 1.0), Row("low", 0.6, 1.0)]
    assert mean_error(rows) == pytest.approx(0.3)
    assert "worst -40% (low)" in error_lines(rows)
