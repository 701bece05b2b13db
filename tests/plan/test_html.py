"""The report of a plan shows the limit, hidden messages, doubts, and what is not listed."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from gridformer.plan import html
from gridformer.plan.advice import advise
from gridformer.plan.html import fastest_that_fits, memory_factors, write_plan_page
from gridformer.plan.prediction import Prediction
from gridformer.plan.search import Result, Search
from gridformer.plan.show import unlisted
from tests.support.marks import extra
from tests.support.plans import cluster, found_on_8, predictor, run_of, search, trace_of

extra("plotly")


@pytest.fixture
def no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeline of the best layout is left empty, because only a trace could show one."""

    def predicted(run: object, machine: object, memory: bool, timeline: bool) -> Prediction:
        assert not memory
        assert timeline
        return trace_of(found_on_8().layouts[0])

    monkeypatch.setattr(html, "predict", predicted)


def warned(result: Result) -> Result:
    """Return layouts with a warning that all have, one of their own, and hidden messages."""
    layouts = []
    for number, one in enumerate(result.layouts):
        parts = replace(trace_of(one).parts, hidden={"dp": 0.25 * one.step_s})
        warnings = ["a doubt of <all>", f"a doubt of {number}"]
        prediction = replace(trace_of(one), warnings=warnings, parts=parts)
        layouts.append(replace(one, prediction=prediction))
    refused = [replace(layouts[-1], prediction=replace(trace_of(layouts[-1]), peak_gib=99.0))]
    return replace(result, layouts=layouts[: result.top], refused=refused)


@pytest.mark.usefixtures("no_trace")
def test_a_report_says_what_is_certain_what_is_hidden_and_what_is_left_out(tmp_path: Path) -> None:
    result, asked = warned(found_on_8()), Search(run_of(), cluster(), 8)
    path = tmp_path / "new" / "report.html"
    advice = [advise(asked, one) for one in result.layouts]
    write_plan_page(run_of(), cluster(), 8, result, advice, path)
    page = path.read_text(encoding="utf-8")
    assert page.count("Warning: a doubt of &lt;all&gt;") == 1, "what all layouts share, once"
    for number, one in enumerate(result.layouts, start=1):
        assert page.count(f"{number}. {one.name}") >= 2, "in the table and with its reasons"
        assert f"Warning: a doubt of {number - 1}\n" in page
    limit = result.layouts[0].estimate.limit_gib
    assert f"limit {limit:.1f} GiB" in page
    assert "messages over dp 25%" in page
    assert f"Left out: {result.refused[0].name} does not fit when it is traced, with 99.0" in page
    again = replace(result.refused[0], run=result.layouts[0].run)
    assert not any("Left out" in one for one in unlisted(replace(result, refused=[again])))
    # More nodes than the best layout needs numbers of links that nothing was fitted to.
    assert "On 16 devices: outer_efficiency (0.8) of dgx-h100 was not fitted to any data." in page
    assert "Estimates of the listed layouts are 0% to 0% off" in page


def test_a_report_without_layouts_says_what_would_fit(tmp_path: Path) -> None:
    result = search(run_of("gpt-175b", batch=8), cluster(), 8, predictor=predictor)
    assert not result.layouts
    path = tmp_path / "report.html"
    write_plan_page(run_of("gpt-175b"), cluster(), 8, result, [], path, ["Take <more> devices."])
    page = path.read_text(encoding="utf-8")
    assert "<h2>Nothing fits</h2><ul><li>Take &lt;more&gt; devices.</li>" in page.replace("\n", "")
    assert "How certain this is" in page


def test_other_batches_show_no_layout_of_a_kind_that_traces_have_refused() -> None:
    """Where traces need more than estimates, estimates of other batches are taken for too low."""
    large = functools.partial(predictor, peak=4.0)
    found = search(run_of(batch=512), cluster(), 8, top=3, predictor=large)
    factors = memory_factors([*found.layouts, *found.refused])
    assert factors
    assert all(factor == pytest.approx(4.0) for factor in factors.values())
    asked = Search(run_of(batch=512), cluster(), 8)
    chosen, careless = fastest_that_fits(asked, factors), fastest_that_fits(asked, {})
    assert chosen is not None
    assert careless is not None
    assert factors.get(chosen.memory_kind, 1.0) * chosen.estimate.peak_gib <= cluster().limit_gib
    assert careless.run != chosen.run
