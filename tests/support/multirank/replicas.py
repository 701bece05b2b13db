"""Replicas that shard optimizer state or parameters, as several test files train them."""

from typing import Any

import torch
from torch import Tensor

from gridformer.config import LayoutConfig, TrainConfig
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.train.step import ReadRows, Stepper
from gridformer.utils.batch import next_words
from tests.support.multirank.exactness import CPU, axes_of, batch_of, tiny

Layout = dict[str, Any]

SINGLE: Layout = {"scheme": "single", "dp": 2}
THREE: Layout = {"scheme": "single", "dp": 3}
MEGATRON: Layout = {"scheme": "megatron", "cols": 2, "dp": 2}
SEQUENCE: Layout = {**MEGATRON, "sequence_parallel": True}
OPTIMUS: Layout = {"scheme": "optimus", "rows": 2, "cols": 2, "dp": 2}
SUPER: Layout = {"scheme": "subgraph", "branches": 2, "dp": 2}
FIRST: Layout = {**SUPER, "common": "first"}
ODD = {"vocab_size": 97, "ffn_size": 100}
EVEN = {"vocab_size": 96}
# Sizes that 3 does not divide, and tables of fewer rows than replicas.
MODEL: dict[str, Any] = {
    **{"dropout": 0.2, "attention_dropout": 0.1, "max_seq_len": 8},
    **{"hidden_size": 40, "n_heads": 4, "ffn_size": 56},
}


def settings_of(
    layout: Layout, n_layers: int, dtype: Any = "float32", **model: Any
) -> tuple[Model, Axes, Stepper]:
    torch.set_num_threads(1)
    plan = LayoutConfig(**layout)
    axes, config = axes_of(plan), tiny(n_layers=n_layers, max_seq_len=8, **model)
    built = build_parallel(config, plan, axes, 1, CPU, dtype)
    return built, axes, Stepper(built, TrainConfig(global_batch=36, dtype=dtype), axes, plan)


def read_of(model: Model, step: int) -> ReadRows:
    batch = batch_of(step, model.config, 36)
    return lambda rows: next_words(batch[rows])


def in_memory(tensor: Tensor) -> int:
    """Return the number of elements in a tensor's memory."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()
