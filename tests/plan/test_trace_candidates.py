"""The fastest layouts are traced while there is time, each once, and those that fit are listed."""

import functools
import io
import os
from collections import Counter
from dataclasses import replace
from unittest.mock import Mock

import pytest
from rich.console import Console

from gridformer.cli import plan as plan_command
from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.plan import trace_candidates
from gridformer.plan.advice import Advice, Change, advise
from gridformer.plan.prediction import Prediction
from gridformer.plan.roofline import estimate
from gridformer.plan.search import REPLICAS, MemoryKind, PlannedLayout, Search
from gridformer.plan.settings import changed
from gridformer.plan.show import print_result, ranking_as_json
from gridformer.plan.trace_candidates import MOST, OF_EACH, SURE, Queue, Tracing
from gridformer.utils import process as fork_pool
from gridformer.utils.errors import ConfigError
from tests.support.plans import cluster, found_on_8, predictor, run_of, search


def test_what_does_not_fit_is_not_listed_and_one_refusal_speaks_for_layouts_like_it() -> None:
    """If traces need 4 times what is estimated, one of each kind of layout is traced in vain."""
    large = functools.partial(predictor, peak=4.0)
    found = search(run_of(batch=512), cluster(), 8, top=6, predictor=large)
    assert len(found.layouts) >= 6
    for one in found.layouts:
        assert one.traced.fits
        assert 4 * one.estimate.peak_gib <= cluster().limit_gib
    kinds = [one.memory_kind for one in found.refused]
    assert len({*kinds}) == len(kinds) > 0
    assert found.passed_over
    for one in found.passed_over:
        assert 4 * one.estimate.peak_gib > one.estimate.limit_gib
    shown = io.StringIO()
    print_result(run_of(batch=512), found, [], cluster(), Console(file=shown, width=1000))
    near = [one for one in found.layouts[:6] if one.step_s < 1.05 * found.layouts[0].step_s]
    assert len(near) > 1
    assert f"Layouts 1 to {len(near)} are within 5% of the fastest" in shown.getvalue()
    assert (
        "Not traced, as traces of their kind hold more than estimates, and they would not fit: "
        f"{found.passed_over[0].name}" in shown.getvalue()
    )


def test_no_kind_loses_by_an_estimate_alone() -> None:
    """If an estimate of a kind is too high, its fifth layout is traced, and may be the fastest.

    Of kinds that are slow as estimated, two are traced.
    """
    asked = Search(run_of(), cluster(), 8)
    ranked, counted = asked.ranked()
    kinds = {one.kind: [other for other in ranked if other.kind == one.kind] for one in ranked}
    assert kinds.keys() == {"Megatron", "rows alone", "2-D grid", "sub-graph", "pipeline", REPLICAS}
    traced: list[RunConfig] = []
    first, *_, fifth = kinds["2-D grid"][:OF_EACH]

    def traces(run: RunConfig, machine: Cluster) -> Prediction:
        traced.append(run)
        found = predictor(run, machine)
        faster = {fifth.run: 0.01, first.run: 0.2}
        return replace(found, step_s=found.step_s * faster.get(run, 1.0))

    result = search(asked.run, cluster(), 8, top=4, predictor=traces)
    assert result.layouts[0].run == fifth.run
    assert [one.run for one in result.layouts if one.run not in traced] == []
    of_kind = Counter(one.kind for one in result.layouts)
    for kind, some in kinds.items():
        fits = [one for one in some if one.estimate.fits]
        assert of_kind[kind] >= min(len(fits), OF_EACH if kind == fifth.kind else SURE), kind
    assert of_kind["pipeline"] == SURE, "no other may be listed"
    assert of_kind.total() <= MOST
    begun = [PlannedLayout(run, fifth.estimate).kind for run in traced[:6]]
    assert {*begun} == kinds.keys(), "the fastest of each kind come first"
    shown = io.StringIO()
    print_result(asked.run, result, [], cluster(), Console(file=shown, width=1000))
    n, m = len(result.layouts), counted.n_arrangements
    assert f"the 4 fastest of {n} layouts that were traced, of {m} arrangements (" in (
        shown.getvalue()
    )
    listed = {one.kind for one in result.layouts[:4]}
    other = next(one for one in result.layouts if one.kind not in listed)
    assert f"{other.kind}: {result.layouts.index(other) + 1}. " in shown.getvalue()


def test_rows_alone_are_listed_once_and_not_under_both_schemes() -> None:
    names = [one.name for one in found_on_8().layouts if one.kind == "rows alone"]
    shapes = [name.partition(" ")[2] for name in names]
    assert len({*shapes}) == len(shapes) > 1


@pytest.mark.parametrize("peak", [1.0, 50.0])
def test_a_layout_that_was_asked_for_stands_in_its_place(peak: float) -> None:
    """However slow it is, and whether it fits or not."""
    given = [changed(run_of(), {"layout.dp": 8, "layout.micro_batches": 8})]
    given += [changed(run_of(), {"layout.scheme": "megatron", "layout.cols": 4, "layout.dp": 2})]
    runs = [run for run in given if run is not None]
    assert len(runs) == 2

    def slow(run: RunConfig, machine: Cluster) -> Prediction:
        found = predictor(run, machine, peak if run == runs[0] else 1.0)
        return replace(found, step_s=found.step_s * (9.0 if run == runs[0] else 1.0))

    result = search(run_of(), cluster(), 8, top=3, limit_s=0.0, predictor=slow, also=runs)
    asked = Search(run_of(), cluster(), 8)
    listed = ranking_as_json(result, [advise(asked, one) for one in result.listed])["layouts"]
    given_ones = [one for one in listed if one["asked"]]
    assert [one["layout"]["scheme"] for one in given_ones] == ["megatron", "single"]
    megatron, single = given_ones
    assert megatron["place"] == 2
    assert single["fits"] == (peak == 1.0)
    assert single["place"] == (3 if peak == 1.0 else None)
    why = "longer than the fastest (+" if peak == 1.0 else "It does not fit: "
    assert why in single["why"][0]
    shown = io.StringIO()
    advice = [advise(asked, one) for one in result.listed]
    print_result(run_of(), result, advice, cluster(), Console(file=shown, width=1000))
    assert shown.getvalue().count(f"{'3.' if peak == 1.0 else '- '} dp=8") == 2, "table and reasons"
    assert single["why"][0] in shown.getvalue()


@pytest.mark.parametrize(
    ("also", "error"),
    [
        ("layout.dp=8 layout.rows=2", "uses no grid"),
        ("layout.dp=4", "its layout has 4 devices, not --devices 8"),
        ("layout.dp=8 train.global_batch=8", "it changes the model, the data or the batch"),
        ("layout.dp=8 'x", "No closing quotation"),
        ("layout.dq=8", "layout.dq"),
    ],
)
def test_what_was_asked_for_is_checked_before_anything_is_traced(
    monkeypatch: pytest.MonkeyPatch, also: str, error: str
) -> None:
    monkeypatch.setattr(trace_candidates, "Tracing", lambda *_, **__: pytest.fail("begun"))
    with pytest.raises(ConfigError, match=error) as raised:
        plan_command.plan("gpt2-124m", 8, cluster="dgx-h100", also=["layout.dp=8", also])
    assert str(raised.value).startswith("--also ")


def test_after_a_refusal_no_estimate_may_exceed_the_limit() -> None:
    asked = Search(run_of(batch=512), cluster(), 8)
    one, *others = asked.ranked()[0]
    other = next(other for other in others if other.memory_kind != one.memory_kind)
    above = 1.05 * other.estimate.limit_gib
    larger = replace(other, estimate=replace(other.estimate, peak_gib=above))
    assert Queue(asked, [larger]).next(Counter()) is larger
    queue = Queue(asked, [larger])
    queue.refuse(one, 1.01)
    while queue.waiting:
        assert queue.next(Counter()) is not larger
    assert queue.passed_over == [larger]
    queue = Queue(asked, [])
    for _ in range(2):
        queue.refuse(one, 1.2)
    assert len(queue.waiting) == 1, "a layout stands in for another once"


def test_what_was_passed_over_is_traced_if_nothing_else_fits() -> None:
    """The first trace of each kind is far off, and the others need what is estimated."""
    seen: set[MemoryKind] = set()

    def first_is_larger(run: RunConfig, machine: Cluster) -> Prediction:
        kind = PlannedLayout(run, estimate(run, machine)).memory_kind
        peak = 1.0 if kind in seen else 1e3
        seen.add(kind)
        return predictor(run, machine, peak)

    found = search(run_of(batch=512), cluster(), 8, top=10, predictor=first_is_larger)
    assert found.layouts
    assert {one.memory_kind for one in found.layouts} <= {one.memory_kind for one in found.refused}
    assert {one.memory_kind for one in found.refused} == seen


def test_time_limits_what_is_traced() -> None:
    found = search(run_of(), cluster(), 8, top=4, limit_s=0.0, predictor=predictor)
    assert len(found.layouts) == 1
    kinds = Counter(one.kind for one in [*found.layouts, *found.untraced])
    assert kinds["pipeline"] == kinds["rows alone"] == OF_EACH, "these wait for --seconds"


@pytest.mark.parametrize(("devices", "seconds", "left"), [(8, 0, 77), (128, 0, 117), (8, 4, 1)])
def test_loading_counts_in_the_processor_time_of_a_plan(
    monkeypatch: pytest.MonkeyPatch, devices: int, seconds: float, left: float
) -> None:
    """Three seconds pass until the search begins."""
    asked = Mock(began=103.0)
    asked.run.side_effect = KeyboardInterrupt  # ends the command where it begins to search
    monkeypatch.setattr(plan_command, "processor_s", lambda: 100.0)
    monkeypatch.setattr(trace_candidates, "Tracing", lambda *_, **__: asked)
    with pytest.raises(KeyboardInterrupt):
        plan_command.plan("gpt2-124m", cluster="dgx-h100", devices=devices, seconds=seconds)
    asked.run.assert_called_once_with(pytest.approx(left), [])


def test_time_that_is_left_is_for_what_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that each trace moves by a second; nine of ten seconds are for the first layouts."""
    now = [0.0]

    def takes_a_second(run: RunConfig, machine: Cluster) -> Prediction:
        now[0] += 1.0
        return predictor(run, machine)

    monkeypatch.setattr(trace_candidates, "processor_s", lambda: now[0])
    tracing = Tracing(Search(run_of(), cluster(), 8), 20, takes_a_second)
    other = changed(tracing.search.run, {"layout.dp": 8})
    assert other is not None
    advised = Advice({}, {}, "", Change({}, 0.1, 1.0, True, other), None)
    monkeypatch.setattr(trace_candidates, "advise", lambda *_: advised)
    tracing.run(10.0)
    assert [len(tracing.traced), tracing.result.seconds] == [10, 9.0]
    assert tracing.traced[-1].run == other
    assert len(tracing.result.untraced) > 5


@pytest.mark.parametrize("fits", [True, False])
def test_what_advice_has_traced_is_not_traced_again(
    monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """Advice finds a layout that waits for its trace, and another that has its arrangement."""
    tracing = Tracing(Search(run_of(), cluster(), 8), 20, predictor)
    tracing.until(0.0)
    result = tracing.result
    waiting, alike = result.untraced[:2]
    changes = {"layout.micro_batches": alike.run.layout.micro_batches * 2}
    other = changed(alike.run, changes)
    assert other is not None, "a valid layout with the same arrangement"
    both = [replace(waiting, prediction=predictor(waiting.run, cluster()))]
    both += [replace(alike, run=other, prediction=predictor(other, cluster()))] * fits
    (result.layouts if fits else result.refused).extend(both)
    traced: list[RunConfig] = []

    def noted(run: RunConfig, machine: Cluster) -> Prediction:
        traced.append(run)
        return predictor(run, machine)

    tracing.predictor = noted
    tracing.until(0.0)
    assert not [one for one in result.untraced if one.run == waiting.run]
    tracing.until(float("inf"))
    assert waiting.run not in traced
    assert fits == (alike.run not in traced)
    names = [one.name for one in result.layouts]
    assert len({*names}) == len(names)


def test_copies_of_the_process_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.getpid()
    seen: list[int] = []

    def elsewhere(run: RunConfig, machine: Cluster) -> Prediction:
        seen.append(os.getpid())
        found = predictor(run, machine)
        return replace(found, warnings=[str(os.getpid() != here)])

    monkeypatch.setattr(trace_candidates, "predict", elsewhere)
    monkeypatch.setattr(trace_candidates, "fast_fakes", lambda: None)
    for module in (trace_candidates, fork_pool):
        monkeypatch.setattr(module, "can_copy", lambda: True)
        monkeypatch.setattr(module, "n_cores", lambda: 2)
    found = search(run_of(), cluster(), 8, top=4, predictor=elsewhere)
    assert [one.run for one in found.listed] == [one.run for one in found_on_8().listed]
    warnings = [one.prediction.warnings for one in found.layouts if one.prediction]
    assert warnings == [["True"]] * len(found.layouts)
    assert not seen, "this process has traced nothing"
