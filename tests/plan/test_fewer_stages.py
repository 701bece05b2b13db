"""Deep pipelines: what follows from a few stages is what all stages take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gridformer.cluster import Cluster, Level, load_cluster
from gridformer.config import RunConfig, parse_run
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.validation import check_layout
from gridformer.plan import fewer_stages as module
from gridformer.plan import predict as predicting
from gridformer.plan.fewer_rounds import removable_rounds
from gridformer.plan.fewer_stages import FewerStages, fewer_stages
from gridformer.plan.predict import predict
from gridformer.plan.prediction import Prediction
from gridformer.plan.program import Spent
from tests.support.fake_gpu import InProcess
from tests.support.marks import full_unless

MODEL = {
    "family": "gpt2",
    "n_layers": 32,
    "hidden_size": 4096,
    "n_heads": 32,
    "max_seq_len": 2048,
    "vocab_size": 51200,
    "dropout": 0.0,
}
MEGATRON = {"scheme": "megatron", "cols": 8, "pp": 16, "micro_batches": 32}
LAYOUTS: dict[str, dict[str, Any]] = {
    "two stages in a node": MEGATRON | {"cols": 4, "pp": 32, "micro_batches": 64},
    "no whole rounds": MEGATRON | {"micro_batches": 39},
    "1f1b": MEGATRON,
    "fewer micro-batches than stages": MEGATRON | {"micro_batches": 12},
    "gpipe": MEGATRON | {"pipeline": "gpipe"},
    "two stages a rank": MEGATRON | {"stages_per_rank": 2},
    "two stages a rank, a round of 17": MEGATRON | {"stages_per_rank": 2, "micro_batches": 17},
    "two stages a rank, a round of 25": MEGATRON | {"stages_per_rank": 2, "micro_batches": 25},
    "two stages a rank, a round of 31": MEGATRON | {"stages_per_rank": 2, "micro_batches": 31},
    "two stages a rank, rounds of 18": MEGATRON | {"stages_per_rank": 2, "micro_batches": 36},
    "three stages a rank, rounds of 18": MEGATRON | {"stages_per_rank": 3, "micro_batches": 54},
    "many rounds": MEGATRON | {"micro_batches": 96},
    "many rounds and some more": MEGATRON | {"micro_batches": 99},
    "grids": {"scheme": "optimus", "rows": 2, "cols": 4, "pp": 16, "micro_batches": 32},
    "sub-graphs": {"scheme": "subgraph", "branches": 4, "pp": 32, "micro_batches": 32},
    "common layers on the first": {
        "scheme": "subgraph", "branches": 4, "common": "first", "pp": 32, "micro_batches": 32,
    },
    "sharded replicas": {"dp": 8, "dp_mode": "fsdp", "pp": 16, "micro_batches": 32},
    "replicas": MEGATRON | {"cols": 2, "dp": 4, "dp_mode": "zero1"},
    "stages of two lengths": MEGATRON | {"pp": 36, "micro_batches": 72},
    "two lengths, two in a node": MEGATRON | {"cols": 4, "pp": 44, "micro_batches": 88},
}  # fmt: skip
CASES = [(name, racks) for name in LAYOUTS for racks in (False, True)]
QUICK = [("1f1b", False), ("two stages a rank", True), ("two stages a rank, a round of 25", False)]
LAYERS = {  # others have 32
    "stages of two lengths": 52,
    "two lengths, two in a node": 64,
    "three stages a rank, rounds of 18": 48,
    "sub-graphs": 64,
    "common layers on the first": 64,
}


def run_of(layout: dict[str, Any], **model: Any) -> RunConfig:
    sections = {"model": MODEL | model, "data": {"path": "."}, "layout": layout}
    batch = layout["micro_batches"] * layout.get("dp", 1) * layout.get("branches", 1)
    run = parse_run({**sections, "train": {"global_batch": 4 * batch, "dtype": "bfloat16"}})
    check_layout(run)
    return run


def with_racks() -> Cluster:
    """Return a machine whose racks hold two nodes of eight devices."""
    cluster = load_cluster("dgx-h100")
    node, outer = cluster.levels
    rack = outer.model_copy(update={"name": "rack", "size": 16})
    slower = outer.bandwidth_gbps.model_copy(update={"value": 5})
    levels = (node, rack, Level.model_validate(dict(outer) | {"bandwidth_gbps": slower}))
    return cluster.model_copy(update={"levels": levels})


@contextmanager
def any_depth() -> Iterator[None]:
    """Let stages be left out of pipelines that are not deep enough for it to be worth while."""
    with patch.object(module, "PASSES", 0), patch.object(module, "WORTH", 2):
        yield


def both(run: RunConfig, racks: bool) -> tuple[bool, list[Prediction]]:
    """Return whether stages are left out, and the predictions with and without that."""
    torch.set_num_threads(1)
    cluster = with_racks() if racks else load_cluster("dgx-h100")
    with any_depth():
        used = fewer_stages(run, decide_run(run), cluster) is not None
        few = predict(run, cluster, memory=False)
    with patch.object(predicting, "fewer_stages", return_value=None):
        return used, [few, predict(run, cluster, memory=False)]


@pytest.mark.parametrize(("name", "racks"), full_unless(QUICK.__contains__, CASES, unpack=True))
def test_few_stages_say_what_all_stages_take(gpu: InProcess, name: str, racks: bool) -> None:
    used, (few, whole) = gpu(both, run_of(LAYOUTS[name], n_layers=LAYERS.get(name, 32)), racks)
    assert used
    assert few.step_s == pytest.approx(whole.step_s, rel=1e-6)
    assert few.launches == whole.launches
    assert racks or few.rank == whole.rank  # with racks several ranks are equally slow
    # What ranks wait for, others or messages, is not as regular, least of all where links differ.
    near = (1e-2 if racks else 1e-3) * whole.step_s
    for part in ("forward_s", "backward_s", "update_s", "bubble_s", "exposed_communication_s"):
        found, wanted = getattr(few, part), getattr(whole, part)
        assert found == pytest.approx(wanted, abs=near), part
    for part in ("products", "attention", "memory_bound", "update"):
        assert getattr(few.parts, part) == pytest.approx(getattr(whole.parts, part), rel=1e-6)


def left_out(layout: dict[str, Any], cluster: Cluster, **model: Any) -> FewerStages | None:
    run = run_of(layout, **model)
    with any_depth():
        return fewer_stages(run, decide_run(run), cluster)


def test_stages_are_left_out_only_where_the_others_stand_for_them() -> None:
    cluster = load_cluster("dgx-h100")
    found = left_out(MEGATRON, cluster)
    assert found is not None
    assert [one.run.layout.pp for one in found.pipelines] == [8, 9, 10]
    assert [one.run.model.n_layers for one in found.pipelines] == [16, 18, 20]
    assert found.more == 7
    pairs = left_out(MEGATRON | {"cols": 4}, cluster)
    assert pairs is not None
    assert pairs.step == (0, 2, 0), "two stages share a node"
    # Stages that are not equal, processes that share cores, and rounds of no whole number.
    assert left_out(MEGATRON, cluster, n_layers=41) is None
    cores = cluster.model_copy(update={"device": cluster.device.model_copy(update={"kind": "cpu"})})
    assert left_out(MEGATRON, cores) is None
    assert fewer_stages(run_of(MEGATRON), decide_run(run_of(MEGATRON)), cluster) is None


def test_rounds_of_more_micro_batches_than_ranks_are_not_left_out() -> None:
    """Five rounds of 9 on 8 ranks; without three times 8 of them there would be 2 of 10.5."""
    layout = MEGATRON | {"pp": 8, "stages_per_rank": 2}
    assert removable_rounds(run_of(layout | {"micro_batches": 40})) == 3
    assert removable_rounds(run_of(layout | {"micro_batches": 45})) == 0


def test_pipelines_that_are_not_on_a_line_stand_for_none() -> None:
    found = left_out(MEGATRON, load_cluster("dgx-h100"))
    assert found is not None
    samples = [[Spent(rank, end=1.0 + n / 10) for rank in range(8 + n)] for n in range(3)]
    deep = found.extended(samples)
    assert deep is not None
    assert [one.end for one in deep] == pytest.approx([1.8] * 8)
    samples[2][-1] = replace(samples[2][-1], end=1.21)
    assert found.extended(samples) is None
