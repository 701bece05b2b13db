"""The memory in which asynchronous saves keep their copies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gridformer.checkpoint import checkpoint
from gridformer.checkpoint.blocks import TensorBlock, with_moments, written_here
from gridformer.checkpoint.snapshot import Snapshot, bytes_of
from gridformer.config import LayoutConfig, TrainConfig, parse_run
from gridformer.config.train import DType
from gridformer.mesh import Axes, Axis
from gridformer.parallel import build_parallel
from gridformer.train.step import Stepper

MODEL = {"n_layers": 2, "hidden_size": 12, "n_heads": 2, "vocab_size": 11, "max_seq_len": 4}
RUN = parse_run({"model": MODEL, "data": {"path": "unused"}})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_what_is_reserved_for_parameters_and_moments_is_what_they_take(dtype: DType) -> None:
    train = TrainConfig(dtype=dtype)
    model = build_parallel(RUN.model, LayoutConfig(), Axes(), 1, torch.device("cpu"), train.dtype)
    updates = Stepper(model, train, Axes()).updates
    reserved = with_moments(checkpoint.updated_parameters(model))
    updates.allocate(1)
    shards = checkpoint.shards_of(model, updates)
    assert [*reserved] == [*shards]
    assert bytes_of(written_here(reserved, Axes())) == bytes_of(written_here(shards, Axes())) > 0
    for index in range(3):  # replicas divide them, each by their order and sizes
        axes = Axes(dp=Axis("dp", 3, index))
        mine = bytes_of(written_here(shards, axes))
        assert (
            bytes_of(written_here(reserved, axes)) == mine < bytes_of(written_here(shards, Axes()))
        )


def test_memory_that_was_reserved_is_not_pinned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def register(_: int, n_bytes: int, __: int) -> int:
        pinned.append(n_bytes)
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda _: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    blocks = {
        "x": TensorBlock(torch.arange(6.0), (6,), (0,)),
        "y": TensorBlock(torch.ones(3), (3,), (0,)),
    }
    snapshot = Snapshot()
    snapshot.reserve(bytes_of(blocks), pinned=True)
    copies = snapshot.take(blocks)
    snapshot.reserve(bytes_of(blocks), pinned=True)
    assert pinned == [bytes_of(blocks)]
    assert {name: copy.tensor.tolist() for name, copy in copies.items()} == {
        "x": [0, 1, 2, 3, 4, 5],
        "y": [1, 1, 1],
    }
