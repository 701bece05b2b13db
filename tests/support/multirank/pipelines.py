"""The work of one rank to compare a pipeline with one device, for every family and its options."""

from __future__ import annotations

from typing import Any

import torch

from gridformer.config import Family, LayoutConfig, ModelConfig, TrainConfig
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.parallel.data.copies import assert_copies_equal
from gridformer.parallel.data.gradients import reduce_gradients
from gridformer.parallel.tensor.linear import weights_kept
from gridformer.train.step import ReadRows, Stepper
from gridformer.utils.batch import IGNORE, Batch
from tests.support.multirank.exactness import (
    CPU,
    Tensors,
    axes_of,
    computed_once,
    distance,
    gradients,
    values,
)

Layout = dict[str, Any]

ROWS, LENGTH, SOURCE = 24, 8, 12
SIZE = {"hidden_size": 16, "n_heads": 4, "vocab_size": 29, "max_seq_len": 12}
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
SETTINGS = TrainConfig(
    global_batch=ROWS,
    dtype="float64",
    clip_norm=0.05,
    lr=1e-3,
    weight_decay=0.1,
    adam_eps=1e-4,
)


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
    def read_of(batch: Batch) -> ReadRows:
        return lambda rows: {key: value[rows] for key, value in batch.items()}

    return [read_of(batch_of(config, step)) for step in range(n_steps)]


def stepper_of(
    config: ModelConfig, plan: LayoutConfig, axes: Axes, dtype: str = SETTINGS.dtype
) -> Stepper:
    model = build_parallel(config, plan, axes, SETTINGS.seed, CPU, dtype)
    return Stepper(model, SETTINGS, axes, plan)


def compare(layout: Layout, config: ModelConfig, n_steps: int = 3) -> dict[str, float]:
    """Return the largest relative differences to one device; see exactness.compare."""
    torch.set_num_threads(1)
    plan = LayoutConfig(**layout)
    want = computed_once(_one_device, config.model_dump_json(), n_steps)
    axes = axes_of(plan)
    stepper = stepper_of(config, plan, axes)
    cut = stepper.model
    worst = {"init": distance(cut, values(cut), want["initial"]), "loss": 0.0}
    reads = reads_of(config, n_steps)
    worst["grad"] = distance(cut, first_gradients(stepper, reads[0]), want["gradients"])
    for step, read in enumerate(reads):
        got = stepper(step, read)
        for name, loss in {**got.losses, "norm": got.grad_norm, "loss": got.loss}.items():
            difference = abs(loss / want["numbers"][step][name] - 1)
            worst[name] = max(worst.get(name, 0.0), difference)
        assert got.tokens == want["numbers"][step]["n_tokens"]
    worst["parameter"] = distance(cut, values(cut), want["trained"])
    assert_copies_equal(cut, axes)
    found = stepper.evaluate(reads[:2])
    worst["eval"] = abs(found.loss / want["evaluated"] - 1)
    return worst


def first_gradients(stepper: Stepper, read: ReadRows) -> Tensors:
    """Return the gradients of the sum of losses, before clipping, by the production passes."""
    model = stepper.model
    model.train()
    model.zero_grad()
    model.dropout_rng.step = 0
    work = stepper.split.micro_batches(stepper._read(read))
    ones = {name: torch.ones(()) for name in Model.counts(work[0].batch)}
    with weights_kept(model):
        stepper.passes.train(work, ones)
    reduce_gradients(stepper.parameters, stepper.axes, stepper.sums)
    return gradients(model)


def _one_device(config_json: str, n_steps: int) -> dict[str, Any]:
    config = ModelConfig.model_validate_json(config_json)
    stepper = stepper_of(config, LayoutConfig(), Axes())
    whole = stepper.model
    reads = reads_of(config, n_steps)
    found: dict[str, Any] = {"initial": {n: v.clone() for n, v in values(whole).items()}}
    found["gradients"] = {n: g.clone() for n, g in first_gradients(stepper, reads[0]).items()}
    results = [stepper(step, read) for step, read in enumerate(reads)]
    assert min(result.grad_norm for result in results) > SETTINGS.clip_norm, "the test must clip"
    found["numbers"] = [
        {**r.losses, "loss": r.loss, "norm": r.grad_norm, "n_tokens": r.tokens} for r in results
    ]
    found["trained"] = values(whole)
    found["evaluated"] = stepper.evaluate(reads[:2]).loss
    return found
