"""Runs that begin with weights of a model with other tables: exact under every layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gridformer.checkpoint import weights
from gridformer.config import LayoutConfig
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.train.plan import Plan
from gridformer.train.step import Stepper
from tests.support.checkpoints import flip_a_bit, save_checkpoint
from tests.support.marks import full_unless
from tests.support.multirank.layouts import n_of, name_of
from tests.support.multirank.pool import RankFailed, WorkerPool
from tests.support.multirank.runs import losses, plan_of, train

LAYOUTS: list[dict[str, Any]] = [
    {"scheme": "optimus", "rows": 2, "cols": 2},
    {"scheme": "megatron", "cols": 2, "dp": 2, "dp_mode": "fsdp"},
    {"scheme": "subgraph", "branches": 2, "dp": 2, "dp_mode": "zero1"},
    {"scheme": "megatron", "cols": 2, "pp": 2, "micro_batches": 2},
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, token_folder: Path) -> Path:
    """A checkpoint with fewer tokens and positions than the runs have, and of another seed."""
    out = tmp_path_factory.mktemp("source")
    run = plan_of(token_folder, out, {"scheme": "single"}, seed=5).run
    model = run.model.model_copy(update={"vocab_size": 290, "max_seq_len": 10})
    run = run.model_copy(update={"model": model})
    made = build_parallel(model, LayoutConfig(), Axes(), 5, torch.device("cpu"), "float64")
    updates = Stepper(made, run.train, Axes()).updates
    updates.allocate(1)
    save_checkpoint(out, 1, 0, run, made, updates, Axes())
    return out


def plan_from(source: Path, data: Path, out: Path, layout: dict[str, Any]) -> Plan:
    begin = {"init_from": str(source), "init_embeddings": "resize"}
    plan = plan_of(data, out, layout, steps=2, **begin)
    return replace(plan, start=weights.start_of(plan.run))


@pytest.fixture(scope="module")
def alone(
    pool: WorkerPool, token_folder: Path, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run on one device."""
    out = tmp_path_factory.mktemp("alone")
    pool.run(1, train, plan_from(source, token_folder, out, {"scheme": "single"}))
    return out


@pytest.mark.parametrize("layout", full_unless(lambda one: one is LAYOUTS[0], LAYOUTS), ids=name_of)
def test_losses_are_those_of_one_device(
    pool: WorkerPool,
    token_folder: Path,
    source: Path,
    alone: Path,
    tmp_path: Path,
    layout: dict[str, Any],
) -> None:
    pool.run(n_of(layout), train, plan_from(source, token_folder, tmp_path / "run", layout))
    want, got = losses(alone), losses(tmp_path / "run")
    assert list(got) == [1, 2]
    for step in want:
        assert got[step] == pytest.approx(want[step], rel=1e-9), step


def test_ranks_share_the_checking_of_the_weights(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """If one bit of the numbers in any file is wrong, no run begins with them."""
    source, layout = tmp_path / "source", {"scheme": "megatron", "cols": 2}
    pool.run(2, train, plan_of(token_folder, source, layout, steps=1))
    files = sorted(source.glob("checkpoints/*/*.safetensors"))
    assert len(files) >= 2
    plan = plan_from(source, token_folder, tmp_path / "run", layout)
    for file in files:
        flip_a_bit(file)
        with pytest.raises(RankFailed) as failure:
            pool.run(2, train, plan)
        assert f"{file} is damaged (its checksum is wrong)" in str(failure.value)
        flip_a_bit(file)
