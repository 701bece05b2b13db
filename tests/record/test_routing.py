"""How many tokens experts get in a record, and what estimates and checks say of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gridformer.check import check_step
from gridformer.cluster.file import load_cluster
from gridformer.config import RunConfig
from gridformer.memory.estimate import estimate_ranks
from gridformer.memory.layouts import over_experts
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.validation import check_layout
from gridformer.plan.predict import predict
from gridformer.record.routing import BALANCED, Routing, measured_routing, stated
from gridformer.utils.errors import ConfigError
from tests.support.multirank.memory import a_run

SKEWED = Routing((0.7, 0.1, 0.1, 0.1), "skewed", "a file")
SP: dict[str, Any] = {"scheme": "megatron", "cols": 2, "sequence_parallel": True}


def a_mixture(layout: dict[str, Any], train: dict[str, Any] | None = None) -> RunConfig:
    model = {"family": "llama", "n_experts": 4, "experts_per_token": 2, "n_layers": 3}
    settings = {"device": "cuda", "global_batch": 8, **(train or {})}
    run = a_run(layout, {**model, "hidden_size": 240, "max_seq_len": 16}, settings)
    return check_layout(run)


@pytest.fixture
def skewed() -> Iterator[None]:
    token = stated.set(SKEWED)
    yield
    stated.reset(token)


def test_even_shares_follow_the_experts_of_each_device() -> None:
    assert BALANCED.sizes(100, 4, 2) == [50, 50, 50, 50]
    assert BALANCED.sizes(100, 5, 2) == [60, 40, 60, 60]  # three experts, and two
    assert BALANCED.sizes(7, 3, 4) == [2, 3, 2, 0, 3, 3, 3, 3]


def test_all_devices_are_taken_for_the_fullest() -> None:
    assert SKEWED.sizes(100, 4, 2) == [80, 20, 80, 80]
    with pytest.raises(ConfigError, match="shares of 4 experts, and the model has n_experts=8"):
        SKEWED.sizes(100, 8, 2)


def test_a_run_tells_the_shares_of_its_typical_layer(tmp_path: Path) -> None:
    lines: list[Any] = [
        {"step": 1, "experts": [[0.25, 0.75], [0.5, 0.5]]},
        {"step": 2, "experts": [[0.5, 0.5], [0.3, 0.7], [0.1, 0.9]]},
        {"step": 3},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{")
    found = measured_routing(tmp_path)
    assert found.shares == (0.3, 0.7)
    assert str(tmp_path) in found.source


@pytest.mark.parametrize("text", ["", "{", '{"experts": [[1, "a"]]}', '{"experts": [[0.0, 0.0]]}'])
def test_a_file_without_shares_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="no line of it has shares of experts"):
        measured_routing(tmp_path)
    with pytest.raises(ConfigError, match="no-such"):
        measured_routing(tmp_path / "no-such")


@pytest.mark.usefixtures("skewed")
def test_memory_and_time_are_those_of_the_fullest_device() -> None:
    run, machine = a_mixture({**SP, "dp": 2, "experts_over": ["cols", "dp"]}), "dgx-h100"
    decisions = decide_run(run)
    (full,) = estimate_ranks(run, [0], decisions)
    longer = predict(run, load_cluster(machine))
    assert "routing: skewed" in longer.warnings
    stated.set(BALANCED)
    (even,) = estimate_ranks(run, [0], decisions)
    assert full.peak > even.peak
    shorter = predict(run, load_cluster(machine))
    assert any("as many tokens" in warning for warning in shorter.warnings)
    assert longer.parts.by_kind()["products"] > 1.1 * shorter.parts.by_kind()["products"]


@pytest.mark.parametrize("recompute", ["none", "full", "except_attention"])
def test_the_host_waits_once_for_the_sizes_of_a_layer(recompute: str) -> None:
    layout = {**SP, "experts_over": ["cols"], "micro_batches": 2}
    report = check_step(a_mixture(layout, {"recompute": recompute}), whole=True)
    assert report.ok
    ((place, times),) = report.reads.items()
    assert (place.function, times) == ("TokensOfGrid.compute", 3 * 2)


def test_without_experts_on_other_devices_the_host_waits_for_none() -> None:
    report = check_step(a_mixture(SP), whole=True)
    assert report.ok
    assert not report.reads


def test_a_search_puts_experts_over_the_grid_and_over_replicas() -> None:
    run = a_mixture({**SP, "dp": 8})
    found = [(one.experts_over, one.experts_dp) for one in over_experts(run.model, run.layout, 2)]
    assert found == [((), 0), (("cols", "dp"), 2), (("cols",), 0)]
