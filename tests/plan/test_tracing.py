"""The fastest layouts are traced while there is time, each once, and those that fit are listed."""

from __future__ import annotations

import functools
import io
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from gridformer.cli import plan as plan_command
from gridformer.cluster import Cluster
from gridformer.config import RunConfig
from gridformer.plan import second_look
from gridformer.plan import tracing as plan_tracing
from gridformer.plan.analytic import estimate
from gridformer.plan.changes import arrangement
from gridformer.plan.prediction import Prediction
from gridformer.plan.ranking import print_result
from gridformer.plan.search import Found, Kind, Search, kind_of
from gridformer.plan.settings import changed
from gridformer.plan.tracing import Queue, Tracing, search
from gridformer.utils import beside
from tests.support.plans import cluster, found_on_8, predictor, run_of


def test_nothing_that_the_trace_says_does_not_fit_is_listed() -> None:
    large = functools.partial(predictor, peak=4.0)
    found = search(run_of(batch=512), cluster(), 8, top=3, predictor=large)
    assert found.refused, "the estimates fit, so some traces were refused"
    assert all(one.prediction and one.prediction.fits for one in found.layouts)
    limit = cluster().limit_gib
    assert all(4 * one.estimate.peak_gib <= limit for one in found.layouts)


def test_one_refusal_speaks_for_layouts_like_it() -> None:
    """If traces need 4 times what is estimated, one of each kind of layout is traced in vain."""
    large = functools.partial(predictor, peak=4.0)
    found = search(run_of(batch=512), cluster(), 8, top=6, predictor=large)
    assert len(found.layouts) == 6
    kinds = [kind_of(one) for one in found.refused]
    assert len({*kinds}) == len(kinds) > 0
    assert found.passed_over
    for one in found.passed_over:
        assert 4 * one.estimate.peak_gib > one.estimate.limit_gib
    shown = io.StringIO()
    print_result(run_of(batch=512), found, [], "dgx-h100", Console(file=shown, width=1000))
    assert (
        f"Not traced, because by the same factor these would not fit: {found.passed_over[0].name}"
        in shown.getvalue()
    )


def test_after_a_refusal_no_estimate_may_exceed_the_limit() -> None:
    asked = Search(run_of(batch=512), cluster(), 8)
    one, *others = asked.ranked()[0]
    other = next(other for other in others if kind_of(other) != kind_of(one))
    above = 1.05 * other.estimate.limit_gib
    larger = replace(other, estimate=replace(other.estimate, peak_gib=above))
    assert Queue(asked, [larger]).next(1) == [larger]
    queue = Queue(asked, [larger])
    queue.refuse(one, 1.01)
    assert larger not in queue.next(9)
    assert queue.passed_over == [larger]


def test_a_layout_stands_in_for_another_once() -> None:
    asked = Search(run_of(batch=512), cluster(), 8)
    one, *_ = asked.ranked()[0]
    queue = Queue(asked, [])
    for _ in range(2):
        queue.refuse(one, 1.2)
    assert len(queue) == 1


def test_what_was_passed_over_is_traced_if_nothing_else_fits() -> None:
    """The first trace of each kind is far off, and the others need what is estimated."""
    seen: set[Kind] = set()

    def first_is_larger(run: RunConfig, machine: Cluster) -> Prediction:
        kind = kind_of(Found(run, estimate(run, machine)))
        peak = 1.0 if kind in seen else 1e3
        seen.add(kind)
        return predictor(run, machine, peak)

    found = search(run_of(batch=512), cluster(), 8, top=10, predictor=first_is_larger)
    assert found.layouts
    assert {kind_of(one) for one in found.layouts} <= {kind_of(one) for one in found.refused}
    assert {kind_of(one) for one in found.refused} == seen


def test_time_limits_what_is_traced() -> None:
    found = search(run_of(), cluster(), 8, top=4, limit_s=0.0, predictor=predictor)
    assert len(found.layouts) == 1
    assert len(found.untraced) == 3


class Asked(Exception):  # noqa: N818
    """Ends a command where it begins to search, with the seconds that it allows."""


@pytest.mark.parametrize(
    ("devices", "seconds", "html", "left"),
    [
        (8, 0.0, False, 5.5),
        (128, 0.0, False, 47.0),
        (8, 4.0, False, 4.0),
        (8, 0.0, True, 22.0),
        (128, 0.0, True, 47.0),
        (8, 4.0, True, 4.0),
    ],
)
def test_loading_counts_in_the_time_of_a_plan(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    devices: int,
    seconds: float,
    html: bool,
    left: float,
) -> None:
    clock = iter([100.0, 103.0])

    def ask(_: Tracing, limit_s: float) -> None:
        raise Asked(limit_s)

    monkeypatch.setattr(plan_command, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(plan_tracing, "Tracing", lambda *_, **__: None)
    monkeypatch.setattr(second_look, "trace_in_time", ask)
    with pytest.raises(Asked) as asked:
        plan_command.plan(
            "gpt2-124m",
            cluster="dgx-h100",
            devices=devices,
            seconds=seconds,
            html=tmp_path / "report.html" if html else None,
        )
    assert asked.value.args[0] == pytest.approx(left)


def test_time_that_advice_leaves_is_for_more_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that each trace moves by a second; four of five seconds are for the first layouts."""
    now = [0.0]

    def takes_a_second(run: RunConfig, machine: Cluster) -> Prediction:
        now[0] += 1.0
        return predictor(run, machine)

    clock = SimpleNamespace(monotonic=lambda: now[0])
    for module in (plan_tracing, second_look):
        monkeypatch.setattr(module, "time", clock)
    tracing = Tracing(Search(run_of(), cluster(), 8), 20, takes_a_second)
    tracing.until(4.0)
    assert len(tracing.result.layouts) == 4
    advised: list[float] = []

    def advise_nothing(*_: object) -> list[Found]:
        advised.append(now[0])
        return []

    monkeypatch.setattr(second_look, "traced_with_advice", advise_nothing)
    second_look.trace_in_time(tracing, 5.0)
    assert advised == [4.0]
    assert len(tracing.result.layouts) == 5
    assert tracing.result.seconds == 5.0
    listed = [one.run for one in tracing.result.layouts]
    assert not [one for one in tracing.result.untraced if one.run in listed]


@pytest.mark.parametrize("fits", [True, False])
def test_what_advice_has_traced_is_not_traced_again(
    monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """Advice finds a layout that waits for its trace, and another that has its arrangement."""
    tracing = Tracing(Search(run_of(), cluster(), 8), 20, predictor)
    tracing.until(tracing.began)
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
    assert fits == (alike.run not in [one.run for one in result.untraced])
    tracing.until(float("inf"))
    assert waiting.run not in traced
    assert fits == (alike.run not in traced)
    arranged = [arrangement(one.run.layout) for one in result.layouts]
    assert len({*arranged}) == len(arranged)


def test_copies_of_the_process_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.getpid()
    seen: list[int] = []

    def elsewhere(run: RunConfig, machine: Cluster) -> Prediction:
        seen.append(os.getpid())
        found = predictor(run, machine)
        return replace(found, warnings=[str(os.getpid() != here)])

    monkeypatch.setattr(plan_tracing, "predict", elsewhere)
    monkeypatch.setattr(plan_tracing, "fast_fakes", lambda: None)
    for module in (plan_tracing, beside):
        monkeypatch.setattr(module, "can_copy", lambda: True)
        monkeypatch.setattr(module, "n_cores", lambda: 2)
    found = search(run_of(), cluster(), 8, top=4, predictor=elsewhere)
    assert [one.run for one in found.layouts] == [one.run for one in found_on_8().layouts]
    warnings = [one.prediction.warnings for one in found.layouts if one.prediction]
    assert warnings == [["True"]] * 4
    assert not seen, "this process has traced nothing"
