"""The search finds layouts that fit, and what it writes is a run file that trains."""

import functools
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gridformer.cluster.file import load_cluster
from gridformer.config import NO_PATH, LayoutConfig, load_run
from gridformer.launch.plan import read_run_without_data
from gridformer.parallel.validation import check_layout
from gridformer.plan.advice import advise, remedies
from gridformer.plan.roofline import estimate
from gridformer.plan.search import Search, default_batch
from gridformer.plan.settings import changed, neighbors
from gridformer.plan.show import print_result, ranking_as_json, settings_between, write_run
from gridformer.utils import process as fork_pool
from tests.support.plans import cluster, found_on_8, predictor, run_of, search, trace_of


def test_layouts_are_valid_fit_and_are_sorted() -> None:
    layouts = found_on_8().layouts
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


def test_copies_of_the_process_rank_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_pool, "can_copy", lambda: True)
    monkeypatch.setattr(fork_pool, "n_cores", lambda: 2)
    found, result = Search(run_of(), cluster(), 8).ranked(copies=True)
    alone, counted = Search(run_of(), cluster(), 8).ranked()
    assert [(one.run, one.estimate) for one in found] == [(one.run, one.estimate) for one in alone]
    assert result == counted, "all copies count their estimates"


def test_what_is_written_is_read_as_the_same_run(tmp_path: Path) -> None:
    for number, one in enumerate(found_on_8().layouts):
        path = tmp_path / f"{number}.yaml"
        write_run(one, path, "test 'a\nb: c'")  # the comment holds whatever was typed
        data = one.run.data.model_copy(update={"path": Path(NO_PATH)})
        assert load_run(path) == one.run.model_copy(update={"data": data})
        assert read_run_without_data(path).layout == one.run.layout, "predict and memory read it"


def test_json_has_the_keys_that_others_rely_on() -> None:
    result = found_on_8()
    asked = Search(run_of(), cluster(), 8)
    found = ranking_as_json(result, [advise(asked, one) for one in result.listed])["layouts"]
    keys = {"step_s", "forward_s", "backward_s", "fits", "peak_gib", "model_tflops_per_device"}
    keys |= {"hardware_tflops_per_device", "exposed_communication_s", "bubble_s", "warnings"}
    for one in found:
        assert keys | {"layout", "train", "why"} <= one.keys()
        assert one["train"]["global_batch"] == 64
        assert sum(one["where"].values()) == pytest.approx(1.0, abs=0.01)
        assert {"hidden", "change", "change_traced"} <= one.keys()
    best = result.layouts[0].run.layout
    assert found[0]["layout"] == {"scheme": best.scheme} | best.model_dump(exclude_defaults=True)


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
    print_result(run_of(), replace(result, layouts=layouts), advice, cluster(), console)
    text = shown.getvalue()
    assert [text.count(f"Warning: {one}\n") for one in ("of all", "of 0", "of 1")] == [1, 1, 1]
    assert "train.dtype" not in settings_between(run_of(), layouts[0].run)
    changed = layouts[0].run.layout.model_copy(update={"dp": 5})
    other = layouts[0].run.model_copy(update={"layout": changed})
    assert settings_between(layouts[0].run, other) == "layout.dp=5"
    assert settings_between(run_of(), run_of()) == "This is the run's own layout."


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_layouts_are_whole_on_a_terminal_of_any_width(width: int) -> None:
    result = found_on_8()
    long = LayoutConfig(dp=2, pp=4, stages_per_rank=6, pipeline="interleaved", micro_batches=8)
    layouts = [
        replace(one, run=one.run.model_copy(update={"layout": layout}))
        for one, layout in zip(result.listed, (long, *(x.run.layout for x in result.listed[1:])))
    ]
    shown = io.StringIO()
    console = Console(file=shown, width=width, force_terminal=True, color_system=None)
    print_result(run_of(), replace(result, layouts=layouts), [], cluster(), console)
    table = shown.getvalue().partition("layout ")[2]
    assert max(map(len, table.partition("Left out")[0].splitlines())) <= width
    for one in layouts:
        seconds = f"{one.step_s:.4g}"
        assert seconds in table
        if width > len("1. ") + len(one.name) + len(seconds):
            assert any(one.name in line and seconds in line for line in table.splitlines())
        else:
            assert all(word in table for word in one.name.split())
    assert ("hidden" in table) == (width == 120 or "Left out" in table)


def test_a_file_has_all_columns() -> None:
    shown = io.StringIO()
    print_result(run_of(), found_on_8(), [], cluster(), Console(file=shown, width=40))
    table = shown.getvalue()
    assert all(found.name in table for found in found_on_8().listed)
    assert all(head in table for head in ("layout", "GiB", "hidden", "bubbles", "recompute"))
    assert "Left out" not in table


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


def test_replicas_share_states_before_anything_is_recomputed() -> None:
    """Replicas fit with recomputation, but FSDP without it is faster, and several settings away."""
    grid = {"scheme": "megatron_2d", "rows": 4, "cols": 2, "dp": 9}
    run = run_of("llama-3.1-70b", "data.seq_len=8192", batch=72)
    run = run.model_copy(update={"layout": LayoutConfig.model_validate(grid)})
    found = Search(run, load_cluster("gb200-nvl72"), 72).first(run)
    assert (found.run.train.recompute, found.run.layout.dp_mode) == ("none", "fsdp")


def test_a_model_gets_half_a_million_tokens_a_step() -> None:
    run = run_of()
    assert default_batch(run, 8) * run.seq_len == 2**19
    assert default_batch(run, 4096) == 4096


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


def test_rows_divide_one_long_sequence() -> None:
    """So they do if a batch has fewer sequences than rows, or to have more micro-batches."""
    layouts, _ = Search(run_of(batch=1), cluster(), 8).ranked()
    every = [one for one in layouts if one.run.layout.rows > 1]
    grids = [one for one in every if one.run.layout.stationary != "weight"]
    assert len(every) > len(grids), "or no weight is sent, where a micro-batch has few tokens"
    assert {(one.run.layout.rows, one.run.layout.cols) for one in grids} >= {(8, 1), (4, 2), (2, 4)}
    assert {one.run.layout.rows_over for one in grids} == {"sequence"}
    assert all("over the sequence" in one.name for one in grids)
    layout = ("layout.scheme=optimus", "layout.rows=4", "layout.cols=2", "layout.micro_batches=2")
    changes = [change for change, _ in neighbors(run_of("gpt2-774m", *layout, batch=8))]
    changes = [change for change in changes if "layout.rows_over" in change]
    assert changes == [{"layout.rows_over": "sequence", "layout.micro_batches": 4}]


def test_nodes_of_a_cluster_with_racks_are_ordered_by_rack() -> None:
    node, outer = cluster().levels
    rack = outer.model_copy(update={"name": "rack", "size": 4 * node.size})
    machine = cluster().model_copy(update={"levels": (node, rack, outer)})
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
    zero_bubble = {"layout.stages_per_rank": 1, "layout.pipeline": "zb_h1"}
    assert zero_bubble in tried
    assert {"layout.stages_per_rank": 2, "layout.pipeline": "zbv"} in tried
    split = changed(deep, zero_bubble)
    assert split is not None
    tried = [change for change, _ in neighbors(split)]
    assert {"layout.stages_per_rank": 2, "layout.pipeline": "auto"} in tried
    shallow = run_of("gpt2-774m", "layout.pp=8", "layout.micro_batches=8", batch=8)
    assert {"layout.stages_per_rank": 12} not in [change for change, _ in neighbors(shallow)]
    sub_graph = run_of("gpt2-774m", "layout.scheme=subgraph", "layout.branches=2", batch=8)
    tried = [change for change, _ in neighbors(sub_graph)]
    assert {"layout.order": "contiguous"} in tried


def test_settings_of_replicas_and_of_recomputation_are_tried() -> None:
    replicas = ("layout.dp=16", "layout.dp_mode=fsdp", "layout.devices_per_node=8")
    once = ("layout.micro_batches=2", "train.recompute=full", "train.recompute_layers=5")
    run = run_of("gpt2-774m", *replicas, *once)
    tried = [change for change, _ in neighbors(run)]
    there: dict[str, Any] = {"layout.shard_over": 8, "layout.gradient_sync": "micro_batch"}
    for key, value in {**there, "train.recompute_layers": 7}.items():
        assert {key: value} in tried
    other = changed(run, there)
    assert other is not None
    tried = [change for change, _ in neighbors(other)]
    for key, value in {"layout.shard_over": 0, "layout.gradient_sync": "step"}.items():
        assert {key: value} in tried


def test_no_more_layers_are_recomputed_than_memory_demands() -> None:
    run = run_of("gpt2-774m", "layout.dp=8", "train.recompute=full", batch=512)
    asked = Search(run, cluster(), 8)
    found = asked.fewest_recomputed(asked.estimated(run))
    k = found.run.train.recompute_layers
    assert asked.fits(found, 1.0)
    assert 1 < k < run.model.n_layers
    fewer = changed(run, {"train.recompute_layers": k - 1})
    assert fewer is not None
    assert not asked.fits(asked.estimated(fewer), 1.0)
