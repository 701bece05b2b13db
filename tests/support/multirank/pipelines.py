"""Small models of every family for pipelines, their batches, and their training."""

from typing import Any

import torch

from gridformer.config import Family, LayoutConfig, ModelConfig, TrainConfig
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.train.step import ReadRows, Stepper
from gridformer.utils.batch import IGNORE, Batch
from tests.support.multirank.exactness import CPU, TRAIN, rows_of

ROWS, LENGTH, SOURCE = 24, 8, 12
SIZE = {"hidden_size": 16, "n_heads": 4, "vocab_size": 29, "max_seq_len": 12}
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
SETTINGS = TrainConfig(**TRAIN, dtype="float64")


def family(name: Family, **changes: Any) -> ModelConfig:
    """Return a model of four layers per stack, or three and five, which no stage count divides."""
    layers = {"n_layers": 3, "n_decoder_layers": 5} if name in ("t5", "transformer") else {}
    own: dict[Family, dict[str, Any]] = {
        "gpt2": {"n_labels": 3},
        "bert": {"n_labels": 3},
        "t5": {"relative_buckets": 8, "relative_max_distance": 8},
        "transformer": {"label_smoothing": 0.1},
    }
    return ModelConfig(
        **{"family": name, "n_layers": 4, **layers, **own[name], **SIZE, **DROPOUT, **changes}
    )


def batch_of(config: ModelConfig, step: int, rows: int = ROWS) -> Batch:
    """Return a batch with all the family's keys, with padding and ignored targets."""
    generator = torch.Generator().manual_seed(100 + step)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    def some(*shape: int) -> torch.Tensor:
        return draw(4, *shape) > 0

    batch = {"tokens": draw(config.vocab_size, rows, LENGTH)}
    batch["targets"] = draw(config.vocab_size, rows, LENGTH).where(some(rows, LENGTH), IGNORE)
    if config.two_stacks:
        batch["source"] = draw(config.vocab_size, rows, SOURCE)
        batch["source_valid"] = some(rows, SOURCE)
        batch["source_valid"][:, 0] = True
        return batch
    batch |= {"at": draw(LENGTH, rows), "labels": draw(3, rows)}
    if config.family == "bert":
        batch |= {"segments": draw(2, rows, LENGTH), "pair": draw(2, rows)}
        batch["valid"] = some(rows, LENGTH)
        batch["valid"][:, 0] = True
    return batch


def reads_of(config: ModelConfig, n_steps: int) -> list[ReadRows]:
    return [rows_of(batch_of(config, step)) for step in range(n_steps)]


def stepper_of(
    config: ModelConfig, plan: LayoutConfig, axes: Axes, dtype: str = SETTINGS.dtype
) -> Stepper:
    model = build_parallel(config, plan, axes, SETTINGS.seed, CPU, dtype)
    return Stepper(model, SETTINGS, axes, plan)
