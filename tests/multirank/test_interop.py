"""torch.distributed.checkpoint moves parameters from any layout to any program and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.interop import state_dict
from gridformer.mesh import Axes
from gridformer.models import Model, build_model
from gridformer.parallel import build_parallel
from gridformer.parallel.axes import build_axes
from tests.support.multirank.layouts import Layout, n_of
from tests.support.multirank.pool import WorkerPool

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"n_layers": 2, "hidden_size": 24, "n_heads": 12, "max_seq_len": 12}
MODEL = ModelConfig(**SIZES, vocab_size=104)
# No layout below divides these words and heads of keys evenly.
UNEVEN = ModelConfig(**SIZES, family="llama", n_kv_heads=3, vocab_size=101)
GRID: Layout = {"scheme": "optimus", "rows": 2, "cols": 2}
SHARDED: Layout = {"scheme": "megatron", "cols": 2, "dp": 2, "dp_mode": "fsdp"}
LAYOUTS: list[Layout] = [
    GRID,
    SHARDED,
    {"scheme": "optimus", "rows": 2, "cols": 2, "stationary": "input"},
    {"scheme": "megatron_2d", "rows": 2, "cols": 2},
    {"scheme": "megatron", "cols": 2, "pp": 2, "micro_batches": 2},
    {"scheme": "subgraph", "branches": 2, "dp": 2, "dp_mode": "zero1"},
    {"scheme": "single", "pp": 2, "micro_batches": 2},
    {"scheme": "single", "dp": 2, "dp_mode": "fsdp"},
]


def on(layout: Layout, seed: int, config: ModelConfig) -> tuple[Model, Axes]:
    """Return this rank's model."""
    read = LayoutConfig(**layout)
    axes = build_axes(read, "cpu")
    return build_parallel(config, read, axes, seed, CPU), axes


def alone(seed: int, config: ModelConfig) -> dict[str, Tensor]:
    """Return the parameters on one device."""
    model = build_parallel(config, LayoutConfig(), Axes(), seed, CPU)
    return {name: p.detach() for name, p in model.named_parameters()}


def save(layout: Layout, config: ModelConfig, folder: Path) -> None:
    model, _ = on(layout, 3, config)
    dcp.save({"model": state_dict(model)}, checkpoint_id=folder)


def load(layout: Layout, config: ModelConfig, folder: Path) -> None:
    """Load into a model with other values, and compare its blocks with those of the right one."""
    model, _ = on(layout, 4, config)
    dcp.load({"model": state_dict(model)}, checkpoint_id=folder)
    right, _ = on(layout, 3, config)
    want = state_dict(right)
    for name, block in state_dict(model).items():
        assert torch.equal(block.tensor, want[name].tensor), name


def with_fsdp2(source: Path, target: Path) -> None:
    """Read a checkpoint into a plain model that torch shards, and write it from there."""
    with torch.device("meta"):
        model = build_model(UNEVEN)
    model.to_empty(device="cpu")
    fully_shard(model)
    state = model.state_dict()
    assert isinstance(state["tokens.weight"], DTensor)
    dcp.load({"model": state}, checkpoint_id=source)
    for name, want in alone(3, UNEVEN).items():
        assert torch.equal(state[name].full_tensor(), want), name
    dcp.save({"model": state}, checkpoint_id=target)


def test_checkpoints_of_torch_go_to_other_programs_and_back(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """From a grid to a plain model and to one under FSDP2, and from there to another layout."""
    pool.run(n_of(GRID), save, GRID, UNEVEN, tmp_path / "grid")
    with torch.device("meta"):
        plain = build_model(UNEVEN)
    state = plain.to_empty(device="cpu").state_dict()
    dcp.load({"model": state}, checkpoint_id=tmp_path / "grid", no_dist=True)
    for name, want in alone(3, UNEVEN).items():
        assert torch.equal(state[name], want), name
    pool.run(2, with_fsdp2, tmp_path / "grid", tmp_path / "fsdp2")
    pool.run(n_of(SHARDED), load, SHARDED, UNEVEN, tmp_path / "fsdp2")


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS[2:], ids=str)
def test_every_layout_saves_and_loads(pool: WorkerPool, layout: Layout, tmp_path: Path) -> None:
    config = MODEL if layout["scheme"] == "subgraph" else UNEVEN
    pool.run(n_of(layout), save, layout, config, tmp_path)
    pool.run(n_of(layout), load, layout, config, tmp_path)
