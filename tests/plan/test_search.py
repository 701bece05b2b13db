"""The search finds layouts that fit, and what it writes is a run file that trains."""

from __future__ import annotations

import functools
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from gridformer.cli import plan as plan_command
from gridformer.cluster import Cluster, load_cluster
from gridformer.config import LayoutConfig, RunConfig, load_run
from gridformer.launch.plan import read_run_without_data
from gridformer.parallel.validation import check_layout
from gridformer.plan import second_look
from gridformer.plan import tracing as plan_tracing
from gridformer.plan.advice import advise
from gridformer.plan.analytic import estimate
from gridformer.plan.changes import arrangement
from gridformer.plan.emit import NO_DATA, with_cluster, write_run
from gridformer.plan.prediction import Prediction
from gridformer.plan.ranking import layout_of, print_result, ranking_as_json, settings_between
from gridformer.plan.remedies import remedies
from gridformer.plan.search import Found, Kind, Search, default_batch, kind_of
from gridformer.plan.settings import changed, neighbors
from gridformer.plan.tracing import Queue, Tracing, search
from gridformer.utils import beside
from tests.support.plans import cluster, found_on_8, predictor, run_of, trace_of


def test_layouts_are_valid_fit_and_are_sorted() -> None:
    layouts = found_on_8().layouts
    assert len(layouts) == 4
    assert [one.step_s for one in layouts] == sorted(one.step_s for one in layouts)
    for one in layouts:
        check_layout(one.run)
        assert one.run.layout.n_processes == 8
        assert one.run.train.global_batch == 64
        assert trace_of(one).fits


def test_no_change_of_a_setting_makes_the_best_faster() -> None:
    """What the search has improved cannot be improved, as far as it fits."""
    asked, best = Search(run_of(), cluster(), 8), found_on_8().layouts[0]
    assert asked.improved(best) is best


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


def test_copies_of_the_process_rank_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "can_copy", lambda: True)
    monkeypatch.setattr(beside, "n_cores", lambda: 2)
    found, result = Search(run_of(), cluster(), 8).ranked(copies=True)
    alone, counted = Search(run_of(), cluster(), 8).ranked()
    assert [(one.run, one.estimate) for one in found] == [(one.run, one.estimate) for one in alone]
    assert result == counted, "all copies count their estimates"


def test_what_is_written_is_read_as_the_same_run(tmp_path: Path) -> None:
    for number, one in enumerate(found_on_8().layouts):
        path = tmp_path / f"{number}.yaml"
        write_run(one, path, "test 'a\nb: c'")  # the comment holds whatever was typed
        data = one.run.data.model_copy(update={"path": Path(NO_DATA)})
        assert load_run(path) == one.run.model_copy(update={"data": data})
        assert read_run_without_data(path).layout == one.run.layout, "predict and memory read it"


@pytest.mark.parametrize(
    ("layout", "factor", "peak", "sets"),
    [
        (("scheme=optimus", "rows=4", "cols=4"), 0.9, 1.0, True),
        (("scheme=optimus", "rows=4", "cols=4"), 1.0, 1.0, False),  # not faster
        (("scheme=optimus", "rows=4", "cols=4"), 0.9, 1e3, False),  # does not fit
        (("scheme=megatron", "cols=4"), 0.9, 1.0, False),  # has nothing to choose
    ],
)
def test_a_run_file_names_the_cluster_if_that_makes_a_step_faster(
    layout: tuple[str, ...], factor: float, peak: float, sets: bool
) -> None:
    machine = load_cluster("frontera-rtx5000")
    overrides = ["train.dtype=float16", "model.n_heads=16", *(f"layout.{one}" for one in layout)]
    run = run_of("gpt2-774m", *overrides, batch=16)
    before = Found(run, estimate(run, machine), predictor(run, machine))

    def predicted(run: RunConfig, machine: Cluster) -> Prediction:
        found = predictor(run, machine, peak)
        return replace(found, step_s=factor * before.step_s, fits=peak == 1.0)

    found = with_cluster(before, machine, "frontera-rtx5000", predicted)
    assert (found.run.layout.cluster == "frontera-rtx5000") == sets
    assert (found is before) != sets


def test_json_has_the_keys_that_others_rely_on() -> None:
    result = found_on_8()
    asked = Search(run_of(), cluster(), 8)
    found = ranking_as_json(result, [advise(asked, one) for one in result.layouts])["layouts"]
    keys = {"step_s", "forward_s", "backward_s", "fits", "peak_gib", "model_tflops_per_device"}
    keys |= {"hardware_tflops_per_device", "exposed_communication_s", "bubble_s", "warnings"}
    for one in found:
        assert keys | {"layout", "train", "why"} <= one.keys()
        assert one["train"]["global_batch"] == 64
        assert sum(one["where"].values()) == pytest.approx(1.0, abs=0.01)
        assert {"hidden", "change", "change_traced"} <= one.keys()
    assert found[0]["layout"] == layout_of(result.layouts[0].run)


def test_json_tells_what_is_not_listed_and_why() -> None:
    large = functools.partial(predictor, peak=4.0)
    result = search(run_of(batch=512), cluster(), 8, top=6, predictor=large)
    waits = search(run_of(), cluster(), 8, top=4, limit_s=0.0, predictor=predictor).untraced
    found = json.loads(json.dumps(ranking_as_json(replace(result, untraced=waits), [])))
    for key, layouts in (
        ("refused", result.refused),
        ("passed_over", result.passed_over),
        ("untraced", waits),
    ):
        assert layouts
        assert [one["name"] for one in found[key]] == [one.name for one in layouts]
    refused, untraced = found["refused"][0], found["untraced"][0]
    assert refused["peak_gib"] > refused["limit_gib"] >= refused["estimated_peak_gib"]
    assert untraced["step_s"] is None
    assert untraced["estimated_step_s"] == waits[0].step_s
    assert found["arrangements"] == result.n_arrangements


def test_what_is_printed_names_changes_and_shared_warnings_once() -> None:
    result, asked = found_on_8(), Search(run_of(), cluster(), 8)
    layouts = [
        replace(one, prediction=replace(trace_of(one), warnings=["of all", f"of {number}"]))
        for number, one in enumerate(result.layouts[:2])
    ]
    shown = io.StringIO()
    console = Console(file=shown, width=160)
    advice = [advise(asked, one) for one in layouts]
    print_result(run_of(), replace(result, layouts=layouts), advice, "dgx-h100", console)
    text = shown.getvalue()
    assert [text.count(f"Warning: {one}\n") for one in ("of all", "of 0", "of 1")] == [1, 1, 1]
    assert "train.dtype" not in settings_between(run_of(), layouts[0].run)
    changed = layouts[0].run.layout.model_copy(update={"dp": 5})
    other = layouts[0].run.model_copy(update={"layout": changed})
    assert settings_between(layouts[0].run, other) == "layout.dp=5"
    assert settings_between(run_of(), run_of()) == "This is the run's own layout."


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_layouts_are_whole_on_a_terminal_of_any_width(width: int) -> None:
    result = found_on_8()
    long = LayoutConfig(dp=2, pp=4, stages_per_rank=6, pipeline="interleaved", micro_batches=8)
    layouts = [
        replace(one, run=one.run.model_copy(update={"layout": layout}))
        for one, layout in zip(result.layouts, (long, *(x.run.layout for x in result.layouts[1:])))
    ]
    shown = io.StringIO()
    console = Console(file=shown, width=width, force_terminal=True, color_system=None)
    print_result(run_of(), replace(result, layouts=layouts), [], "dgx-h100", console)
    table = shown.getvalue().partition("layout ")[2]
    assert max(map(len, table.partition("Left out")[0].splitlines())) <= width
    for one in layouts:
        seconds = f"{one.step_s:.4g}"
        assert seconds in table
        if width > len(one.name) + len(seconds):
            assert any(one.name in line and seconds in line for line in table.splitlines())
        else:
            assert all(word in table for word in one.name.split())
    assert ("hidden" in table) == (width == 120 or "Left out" in table)


def test_a_file_has_all_columns() -> None:
    shown = io.StringIO()
    print_result(run_of(), found_on_8(), [], "dgx-h100", Console(file=shown, width=40))
    table = shown.getvalue()
    assert all(found.name in table for found in found_on_8().layouts)
    assert all(head in table for head in ("layout", "GiB", "hidden", "bubbles", "recompute"))
    assert "Left out for want" not in table


def test_nothing_fits_and_what_would() -> None:
    run = run_of("gpt-175b", "model.vocab_size=51200", batch=8)
    found = search(run, cluster(), 8, predictor=predictor)
    assert not found.layouts
    said = remedies(Search(run, cluster(), 8), found.smallest)
    assert any("GiB of the" in text for text in said)
    assert any("of its 96 layers" in text for text in said)
    (devices,) = [text for text in said if text.startswith("On ")]
    n = int(devices.split()[1])
    assert n > 8
    larger = Search(run_of("gpt-175b", "model.vocab_size=51200", batch=n), cluster(), n)
    assert any(larger.first(one).estimate.fits for one in larger.arrangements())


def test_a_model_gets_half_a_million_tokens_a_step() -> None:
    run = run_of()
    assert default_batch(run, 8) * run.seq_len == 2**19
    assert default_batch(run, 4096) == 4096


def racked_cluster() -> Cluster:
    """Return `dgx-h100` with racks of four nodes."""
    whole = cluster()
    node, outer = whole.levels
    rack = outer.model_copy(update={"name": "rack", "size": 4 * node.size})
    return whole.model_copy(update={"levels": (node, rack, outer)})


def test_processes_on_a_cpu_share_its_memory() -> None:
    """The estimates of a plan have the limit of its traces."""
    h100 = load_cluster("dgx-h100")
    memory = h100.device.memory_gib.model_copy(update={"value": 12.0})
    cpu = h100.device.model_copy(update={"kind": "cpu", "memory_gib": memory})
    machine = h100.model_copy(update={"device": cpu})
    asked = Search(run_of("gpt2-124m", batch=16), machine, 4)
    (one, *_), _ = asked.ranked()
    assert one.estimate.limit_gib == pytest.approx(0.95 * machine.limit_gib / 4)
    assert estimate(one.run, machine).limit_gib == one.estimate.limit_gib
    assert Search(asked.run, machine, 2, asked.costs).cluster.processes == 2


def test_nodes_of_a_cluster_with_racks_are_ordered_by_rack() -> None:
    machine = racked_cluster()
    assert (cluster().nodes_per_rack, machine.nodes_per_rack) == (0, 4)
    for n, wanted in ((64, 4), (16, 0), (48, 0)):  # two racks; a part of one; one and a half
        found = [run.layout for run in Search(run_of(batch=n), machine, n).arrangements()]
        assert {layout.nodes_per_rack for layout in found} == {wanted}
        assert {layout.devices_per_node for layout in found} == {8}
    plain = Search(run_of(batch=64), cluster(), 64).arrangements()
    assert {run.layout.nodes_per_rack for run in plain} == {0}


def test_layouts_get_choices_for_the_cluster_if_they_are_faster_with_them() -> None:
    machine = load_cluster("frontera-rtx5000")
    grid = ["layout.scheme=optimus", "layout.rows=4", "layout.cols=4", "layout.devices_per_node=4"]
    run = run_of("gpt2-1.5b", "model.n_heads=16", "train.dtype=float16", *grid, batch=16)
    plain, named = (Search(run, machine, 16, named=name) for name in ("", "frontera-rtx5000"))
    before = plain.estimated(run)
    assert plain.for_cluster(before) is before
    found = named.for_cluster(before)
    assert found.run.layout.cluster == "frontera-rtx5000"
    assert found.step_s < 0.95 * before.step_s
    megatron = run_of("gpt2-774m", "layout.scheme=megatron", "layout.cols=4", batch=16)
    assert named.for_cluster(one := named.estimated(megatron)) is one  # nothing is left open


def test_a_search_ranks_layouts_with_choices_for_the_cluster() -> None:
    machine, name = load_cluster("frontera-rtx5000"), "frontera-rtx5000"
    run = run_of("gpt2-774m", "train.dtype=float16", batch=16)
    ranked, _ = Search(run, machine, 16, named=name).ranked()
    chosen = [one for one in ranked if one.run.layout.cluster]
    assert chosen
    for one in chosen:
        plain = changed(one.run, {"layout.cluster": ""})
        assert plain is not None
        assert one.step_s < estimate(plain, machine).step_s


def test_settings_of_pipelines_and_sub_graphs_are_tried() -> None:
    deep = run_of("gpt-175b", "layout.pp=8", "layout.micro_batches=8", batch=8)
    tried = [change for change, _ in neighbors(deep)]
    assert [{"layout.stages_per_rank": k} in tried for k in (2, 3, 4, 6, 8, 12)] == [True] * 6
    shallow = run_of("gpt2-774m", "layout.pp=8", "layout.micro_batches=8", batch=8)
    assert {"layout.stages_per_rank": 12} not in [change for change, _ in neighbors(shallow)]
    sub_graph = run_of("gpt2-774m", "layout.scheme=subgraph", "layout.branches=2", batch=8)
    tried = [change for change, _ in neighbors(sub_graph)]
    assert {"layout.order": "contiguous"} in tried
