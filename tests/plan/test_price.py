"""What a prediction says about the numbers that it rests on."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from gridformer.cluster.file import load_cluster
from gridformer.plan.advice import advise
from gridformer.plan.predict import _prediction
from gridformer.plan.prediction import _ERRORS, doubts, sureness
from gridformer.plan.replay import Spent
from gridformer.plan.search import Search
from gridformer.plan.show import print_prediction, print_result
from tests.support.fenced import ROOT
from tests.support.plans import cluster, found_on_8, predictor, run_of, trace_of


@pytest.mark.parametrize(("devices", "warned"), [(64, False), (68, True), (256, True)])
def test_what_was_fitted_to_few_nodes_is_not_extrapolated_in_silence(
    devices: int, warned: bool
) -> None:
    """Frontera's rows are from at most 16 nodes of 4 devices."""
    text = "slowdown_per_node of frontera-rtx5000 was fitted to runs on at most 16 nodes"
    said = doubts(load_cluster("frontera-rtx5000"), devices)
    assert [f"for {devices // 4} nodes" in one for one in said if one.startswith(text)] == (
        [True] if warned else []
    )


@pytest.mark.parametrize(
    ("cluster", "devices", "expected"),
    [
        ("lassen-v100", 1, "product_efficiency (0.8), memory_efficiency (0.75) of lassen-v100"),
        (
            "lassen-v100",
            8,
            "product_efficiency (0.8), memory_efficiency (0.75), inner_efficiency (0.75), "
            "outer_efficiency (0.8) of lassen-v100",
        ),
        ("dgx-h100", 8, None),  # its file has no number for links between nodes
        ("dgx-h100", 16, "outer_efficiency (0.8) of dgx-h100"),
    ],
)
def test_numbers_that_were_not_fitted_are_named_once(
    cluster: str, devices: int, expected: str | None
) -> None:
    said = [one for one in doubts(load_cluster(cluster), devices) if "any data" in one]
    verb = "were" if expected and "," in expected else "was"
    assert said == ([f"{expected} {verb} not fitted to any data"] if expected else [])
    assert not any("by nothing" in one for one in doubts(load_cluster(cluster), devices))
    inner = "product_efficiency, memory_efficiency, inner_efficiency of dgx-h200 are not determined"
    assert [one.startswith(inner) for one in doubts(load_cluster("dgx-h200"), 8)] == [True]


@pytest.mark.parametrize(
    ("name", "devices", "expected"),
    [
        ("dgx-h100", 8, "+-10%, the mean error for GPUs on NVLink"),
        ("gb200-nvl72", 8, "+-10%, the mean error for GPUs on NVLink"),
        ("frontera-rtx5000", 64, "+-12%, the mean error for GPUs on PCI Express"),
        ("lassen-v100", 8, "+-18%, the mean error for GPUs that nothing was fitted to"),
        ("cpu", 4, "+-9%, the mean error for CPUs of one node"),
        ("cpu", 16, "+-12%, the mean error for CPUs of several nodes"),
    ],
)
def test_errors_are_those_of_like_machines(name: str, devices: int, expected: str) -> None:
    machine = load_cluster("dgx-h100" if name == "cpu" else name)
    if name == "cpu":
        device = machine.device.model_copy(update={"kind": "cpu"})
        machine = machine.model_copy(update={"device": device})
    assert expected in sureness(machine, devices)
    assert all((ROOT / where.split(", ")[-1]).is_file() for _, where in _ERRORS.values())


def test_a_terminal_shows_one_error_and_not_each_undetermined_number() -> None:
    run, machine = run_of("gpt2-774m", "layout.dp=8"), cluster()
    unsure = doubts(machine, 8)
    assert "not determined by" in unsure[0]
    prediction = replace(predictor(run, machine), warnings=[*unsure, "something else"])
    shown = [io.StringIO(), io.StringIO()]
    print_prediction(run, machine, prediction, Console(file=shown[0], width=1000))
    one = replace(found_on_8().layouts[0], prediction=replace(prediction, step_s=1.0))
    assert trace_of(one).warnings == prediction.warnings
    result = replace(found_on_8(), layouts=[one])
    advice = [advise(Search(run, machine, 8), one)]
    print_result(run, result, advice, machine, Console(file=shown[1], width=1000))
    for text in (one.getvalue() for one in shown):
        assert text.count(sureness(machine, 8)) == 1
        assert "not determined by" not in text
        assert "Warning: something else" in text


def test_the_time_after_the_busiest_rank_is_a_bubble() -> None:
    """Another rank may end later although it waits for longer."""
    busiest, last = Spent(0, end=10.0), Spent(1, end=12.0, bubble=5.0)
    for one in (busiest, last):
        one.work["products"] = one.end - one.bubble
        one.phases["forward"] = one.end
    run = run_of()
    parts = _prediction(run, cluster(), [busiest, last], 0.0, 1.0, (1.0, 1.0)).parts
    assert (parts.products, parts.bubble) == (10.0, 2.0), "together the step of 12 s"
