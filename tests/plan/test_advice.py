"""Advice names where the time goes, and only changes that make a step faster."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.memory.layouts import candidates
from gridformer.plan import advice
from gridformer.plan.advice import Advice, advise
from gridformer.plan.prediction import Prediction
from gridformer.plan.search import PlannedLayout, Search
from gridformer.plan.settings import arrangement, changed, single_changes
from gridformer.plan.trace_candidates import Tracing
from tests.support.plans import cluster, found_on_8, predictor, run_of, trace_of


def test_advice_prefers_traces_to_estimates() -> None:
    """A change that an estimate favors is not advised if its trace was slower, or did not fit."""
    asked, result = Search(run_of(), cluster(), 8), found_on_8()
    slow = replace(
        result.layouts[0],
        estimate=replace(result.layouts[0].estimate, step_s=100.0),
        prediction=replace(trace_of(result.layouts[0]), step_s=100.0),
    )
    by_estimate = advise(asked, slow).best
    assert by_estimate is not None
    assert not by_estimate.traced
    run = changed(slow.run, dict(by_estimate.settings))
    assert run is not None
    other = asked.estimated(run)
    trace = predictor(other.run, cluster())

    def again(**found: Any) -> Advice:
        traced = replace(other, prediction=replace(trace, **found))
        return advise(asked, slow, [traced])

    slower = again(step_s=100.0 * other.run.train.global_batch / slow.run.train.global_batch)
    assert slower.best is not None
    assert slower.best.settings != by_estimate.settings
    faster = again(step_s=1e-6)
    assert faster.best is not None
    assert (faster.best.settings, faster.best.traced) == (by_estimate.settings, True)
    assert "in its own trace" in " ".join(faster.sentences)
    large = again(step_s=1e-6, fits=False, peak_gib=1e3)
    assert large.best is not None
    assert large.best.settings != by_estimate.settings
    assert large.too_large is not None
    assert large.too_large.peak_gib == 1e3
    assert again(step_s=50.0, fits=False, peak_gib=1e3).too_large is None, "others save more"


def test_what_a_trace_needs_more_than_its_estimate_its_neighbors_need_too() -> None:
    asked, best = Search(run_of(), cluster(), 8), found_on_8().layouts[0]
    slow = replace(best, estimate=replace(best.estimate, step_s=100.0))
    changes = []
    for times in (1.0, 2.0):
        gib = times * best.estimate.peak_gib
        traced = replace(trace_of(best), step_s=100.0, peak_gib=gib)
        change = advise(asked, replace(slow, prediction=traced)).best
        assert change is not None
        assert arrangement(change.run.layout) == arrangement(best.run.layout)
        changes.append(change)
    assert changes[1].settings == changes[0].settings
    assert changes[1].peak_gib == pytest.approx(2 * changes[0].peak_gib)


def test_advice_names_what_takes_most_time_messages_behind_computation_apart_and_no_noise() -> None:
    asked, best = Search(run_of(), cluster(), 8), found_on_8().layouts[0]
    hidden = {"dp": 30.0, "pp": 1e-9}
    parts = replace(trace_of(best).parts, hidden=hidden, launches=1e-15, bubble=100.0)
    one = replace(best, prediction=replace(trace_of(best), parts=parts, step_s=150.0))
    said = advise(asked, one)
    assert "the pipeline" in said.limit
    assert said.shares["bubble"] == pytest.approx(2 / 3)
    assert said.hidden == {"messages over dp": 0.2}
    assert "Hidden behind computation, and not part of this: messages over dp 20%." in (
        said.sentences
    )
    assert "launches" not in said.shares
    assert sum(said.shares.values()) == pytest.approx(1.0)


GRIDS: list[dict[str, Any]] = [
    {"scheme": "megatron_2d", "rows": 2, "dp": 32, "dp_mode": "fsdp"},
    {"scheme": "megatron_2d", "rows": 2, "cols": 2, "dp": 16},
    {"scheme": "megatron", "cols": 2, "sequence_parallel": True, "dp": 32},
    {"scheme": "optimus", "rows": 1, "cols": 2, "schedule": "gather", "dp": 32},
    {"scheme": "subgraph", "branches": 2, "dp": 32, "common": "first", "order": "topology"},
    {"dp": 32, "pp": 2, "micro_batches": 2, "dp_mode": "zero1"},
]


# What makes a single device a replica of the first of them.
SINGLE: dict[str, Any] = {"layout.dp": 64, "layout.rows": 1, "layout.scheme": "single"}


def changes_of(layout: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], RunConfig]]:
    settings = [f"layout.{key}={value}" for key, value in layout.items()]
    run = run_of("gpt2-774m", *settings, batch=512)
    return list(single_changes(run))


@pytest.mark.parametrize("layout", GRIDS, ids=lambda layout: layout.get("scheme", "single"))
def test_no_change_leads_to_what_a_search_does_not_try(layout: Mapping[str, Any]) -> None:
    tried = {arrangement(one) for one in candidates(64)}
    found = changes_of(layout)
    moved = [settings for settings, _ in found if "layout.dp" in settings]
    assert moved
    for settings, other in found:
        assert arrangement(other.layout) in tried, settings


def test_a_grid_of_one_device_is_called_single() -> None:
    found = [settings for settings, one in changes_of(GRIDS[0]) if one.layout.scheme == "single"]
    assert SINGLE in found


def slow_2d() -> tuple[Search, PlannedLayout, PlannedLayout]:
    """Return a grid that estimates take for slow, and what they take for faster, both traced.

    By its trace the grid is the fastest, and the other one has other settings than those to which
    a change of the grid leads.
    """
    run = run_of("gpt2-1.5b", *(f"layout.{k}={v}" for k, v in GRIDS[0].items()), batch=512)
    asked = Search(run, cluster(), 64)
    grid = asked.estimated(run)
    layout = {"scheme": "single", "rows": 1, "dp": 64, "reshard": "step"}
    other = asked.estimated(changed(run, {f"layout.{k}": v for k, v in layout.items()}) or run)
    estimates = [replace(one.estimate, step_s=s) for one, s in ((grid, 9.0), (other, 0.2))]
    traces = [
        replace(predictor(one.run, cluster()), step_s=s) for one, s in ((grid, 0.2), (other, 0.3))
    ]
    grid, other = (
        replace(one, estimate=e, prediction=p)
        for one, e, p in zip((grid, other), estimates, traces)
    )
    return asked, grid, other


def test_estimates_are_corrected_by_traces_of_the_same_arrangement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, grid, other = slow_2d()
    single = [change for change in single_changes(grid.run) if SINGLE.items() <= change[0].items()]
    assert single
    monkeypatch.setattr(advice, "single_changes", lambda run: single)
    before = advise(asked, grid, [grid])
    assert before.best is not None
    assert before.best.run.layout.scheme == "single"
    assert advise(asked, grid, [grid, other]).best is None


@pytest.mark.parametrize("first_s", [200.0, 1.0])
def test_what_is_advised_for_the_best_is_traced(first_s: float) -> None:
    """The best takes 100 s. The first layout with the same batch takes `first_s`, others 200 s."""
    times = itertools.chain([first_s], itertools.repeat(200.0))

    def predicted(run: RunConfig, machine: Cluster) -> Prediction:
        batches = run.train.global_batch / 64
        seconds = next(times) if batches == 1 else 200.0 * batches
        return replace(predictor(run, machine), step_s=seconds)

    best = found_on_8().layouts[0]
    slow = replace(
        best,
        estimate=replace(best.estimate, step_s=100.0),
        prediction=replace(trace_of(best), step_s=100.0),
    )
    tracing = Tracing(Search(run_of(), cluster(), 8), 4, predicted)
    tracing.traced = [slow]
    tracing.result = replace(found_on_8(), layouts=[slow], refused=[], untraced=[], seconds=0.0)
    tracing.queue.waiting.clear()
    by_estimate = advise(tracing.search, slow).best
    assert by_estimate is not None
    tracing.run(float("inf"))
    layouts = tracing.result.layouts
    assert len(tracing.traced) > 1
    if first_s == 1.0:
        assert layouts[0].step_s == 1.0
        assert layouts[0] in tracing.traced
        names = [one.name for one in layouts]
        assert len({*names}) == len(names)
        assert (slow in layouts) == (names[0] != slow.name)
    else:  # all that is estimated to help is slower by its trace, so it is not advised
        assert layouts[0] == slow
        said = advise(tracing.search, slow, tracing.traced).best
        assert said is None or said.settings != by_estimate.settings
