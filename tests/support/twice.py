"""Two runs of the same steps on one device, compared to the bit."""

from typing import Any

import torch
from torch import Tensor

from gridformer.config import LayoutConfig, TrainConfig
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.train.numerics import set_numerics
from gridformer.train.step import Stepper
from tests.support.multirank.exactness import batches_of, tiny

STEPS = 2
# Enough tokens of few words that many rows add to the same row of the table's gradient.
SIZES = {"max_seq_len": 64, "dropout": 0.1, "attention_dropout": 0.1}


def differing(
    device: str, model: dict[str, Any], train: dict[str, Any], seeds: tuple[int, int] = (1, 1)
) -> list[str]:
    """Return the names of what differs between two runs with `train.deterministic`.

    Call it in a process that has not used a GPU yet.

    Args:
        device: `cpu` or `cuda`.
        model: What differs from `tiny`.
        train: Further settings of training.
        seeds: The seed of each run.
    """
    how = TrainConfig(global_batch=8, deterministic=True, **train)
    set_numerics(how)
    first, second = (_run(torch.device(device), model, how, seed) for seed in seeds)
    return [name for name, bits in first.items() if not torch.equal(bits, second[name])]


def _run(
    device: torch.device, model: dict[str, Any], train: TrainConfig, seed: int
) -> dict[str, Tensor]:
    """Return the parameters after some steps, and the losses and norms on the way."""
    config, axes = tiny(**{**SIZES, **model}), Axes(device_type=device.type)
    built = build_parallel(config, LayoutConfig(), axes, seed, device, train.dtype)
    stepper = Stepper(built, train, axes)
    told = []
    for step in range(STEPS):
        batch = batches_of(step, config, train.global_batch)
        result = stepper(step, lambda rows, batch=batch: {k: x[rows] for k, x in batch.items()})  # type: ignore[misc]
        told.append((result.loss, result.grad_norm))
    found = {name: parameter.detach().cpu() for name, parameter in built.named_parameters()}
    return found | {"loss and norm": torch.tensor(told, dtype=torch.float64)}
