"""The work of one rank on a case of the fuzzer: train it, and compare it with one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gridformer.checkpoint import checkpoint, find
from gridformer.config import FINE_TUNING, LayoutConfig, RunConfig
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data.copies import assert_copies_equal
from gridformer.train.compile import compile_model
from gridformer.train.step import ReadRows, Stepper
from gridformer.utils.batch import IGNORE, Batch, next_words
from tests.support.checkpoints import save_checkpoint
from tests.support.fuzz.case import Case
from tests.support.multirank.exactness import (
    CPU,
    Tensors,
    computed_once,
    distance,
    keep_gradients,
    values,
    with_documents,
    with_pairs,
    without_methods,
)
from tests.support.multirank.pool import group_cache

Found = dict[str, float]
# Largest allowed relative differences in float64. `loose` is that of the first loss in another
# type, as a multiple of CLOSE.
LIMIT = {"init": 0.0, "loss": 1e-9, "norm": 1e-9, "gradient": 1e-9, "parameter": 1e-8}
LIMIT |= {"eval": 1e-9, "loose": 1.0}
CLOSE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
# Of torch.compile: the cheapest, since tests/train/test_compile.py runs the others.
BACKEND = "eager"


@dataclass(frozen=True)
class Reference:
    """Results of one device; the gradients are those of the first batch."""

    initial: Tensors
    gradients: Tensors
    trained: Tensors
    losses: list[float]
    norms: list[float]
    evaluated: float


def train(text: str, number: int, folder: str) -> Found:
    """Train one leg of a case, from the start or from a checkpoint in `folder`."""
    torch.set_num_threads(1)
    case = Case.read(text)
    run = case.legs[number]
    first, end = (case.stop, case.steps) if number else (0, case.stop or case.steps)
    decisions = decide_run(run)
    axes = _axes_of(run, decisions.block)
    model = build_parallel(
        run.model, run.layout, axes, run.train.seed, CPU, run.train.dtype, decisions.choices
    )
    if run.train.compile:
        torch._dynamo.reset()  # what earlier cases have compiled
        compile_model(model, BACKEND)
    stepper = Stepper(model, run.train, axes, run.layout)
    reads = reads_of(case, run)
    if run.train.dtype != "float64":
        return _only_train(case, run, stepper, reads, number, Path(folder))

    want: Reference = computed_once(_one_device, text)
    found = {"init": distance(model, values(model), want.initial)}
    if number:
        checkpoint.load(_only_checkpoint(Path(folder)), model, stepper.updates, axes)
    mine = keep_gradients(stepper)
    found |= {"loss": 0.0, "norm": 0.0}
    for step in range(first, end):
        got = stepper(step, reads[step])
        if step == 0 and not stepper.updates.in_backward:  # which leaves no gradients
            largest = max(float(grad.abs().max()) for grad in want.gradients.values())
            found["gradient"] = distance(model, mine, want.gradients, largest * 1e-3)
        assert got.tokens == int(Model.n_tokens(reads[step](slice(None)))), "tokens are counted"
        found["loss"] = max(found["loss"], _relative(got.loss, want.losses[step]))
        found["norm"] = max(found["norm"], _relative(got.grad_norm, want.norms[step]))
    if run.train.sanity_checks:
        assert_copies_equal(model, axes)
    if end < case.steps:
        save_checkpoint(Path(folder), end, 0, run, model, stepper.updates, axes)
        return found
    # Differences of values that are zero except for rounding, relative to the length of a step.
    found["parameter"] = distance(model, values(model), want.trained, run.train.lr)
    found["eval"] = _relative(stepper.evaluate(reads[::2]).loss, want.evaluated)
    return found


def _only_train(
    case: Case, run: RunConfig, stepper: Stepper, reads: list[ReadRows], number: int, folder: Path
) -> Found:
    """Check in low precision that losses are finite and that the first is close to one device's."""
    axes, found = stepper.axes, {"loose": 0.0}
    first, end = (case.stop, case.steps) if number else (0, case.stop or case.steps)
    if number:
        loaded = checkpoint.load(_only_checkpoint(folder), stepper.model, stepper.updates, axes)
        stepper.scale.skipped = loaded.skipped
        stepper.scale.go_on(loaded.loss_scale, loaded.good_steps)
    for step in range(first, end):
        got = stepper(step, reads[step])
        assert math.isfinite(got.loss)
        assert got.skipped or math.isfinite(got.grad_norm)
        if step == 0:
            want = computed_once(_first_loss, case.text())
            difference = abs(got.loss - want) / max(1.0, abs(want))
            found["loose"] = difference / CLOSE[run.train.dtype]
    if run.train.sanity_checks:
        assert_copies_equal(stepper.model, axes)
    if end < case.steps:
        save_checkpoint(
            folder, end, 0, run, stepper.model, stepper.updates, axes, scale=stepper.scale
        )
    else:
        assert math.isfinite(stepper.evaluate(reads[::2]).loss)
    return found


def _only_checkpoint(folder: Path) -> Path:
    found = find.latest(folder)
    assert found is not None
    return found


def _axes_of(run: RunConfig, block: object) -> Axes:
    """Return the axes of a layout on this group's processes, made once."""
    key = ("fuzz", run.layout.model_dump_json(), str(block))
    if key not in group_cache():
        group_cache()[key] = build_axes(run.layout, "cpu", block)  # type: ignore[arg-type]
    axes: Axes = group_cache()[key]
    return axes


def _alone(run: RunConfig) -> Stepper:
    """Return a stepper for one device without memory-saving methods."""
    settings = without_methods(run.train)
    whole = build_parallel(run.model, LayoutConfig(), Axes(), settings.seed, CPU, settings.dtype)
    return Stepper(whole, settings, Axes())


def _one_device(text: str) -> Reference:
    case = Case.read(text)
    run = case.legs[0]
    stepper, reads = _alone(run), reads_of(case, run)
    initial = {name: value.clone() for name, value in values(stepper.model).items()}
    first = keep_gradients(stepper)
    results = [stepper(step, read) for step, read in enumerate(reads)]
    return Reference(
        initial,
        first,
        values(stepper.model),
        [result.loss for result in results],
        [result.grad_norm for result in results],
        stepper.evaluate(reads[::2]).loss,
    )


def _first_loss(text: str) -> float:
    """Return one device's first loss, in float64."""
    case = Case.read(text)
    run = case.legs[0]
    exact = run.train.model_copy(update={"dtype": "float64"})
    stepper = _alone(run.model_copy(update={"train": exact}))
    return stepper(0, reads_of(case, run)[0]).loss


def _relative(got: float, want: float) -> float:
    """Return the relative difference, or 1 if one of the two is NaN."""
    difference = abs(got - want) / max(abs(want), 1e-6)
    return difference if math.isfinite(difference) else 1.0


def reads_of(case: Case, run: RunConfig) -> list[ReadRows]:
    def read_of(batch: Batch) -> ReadRows:
        return lambda rows: {key: value[rows] for key, value in batch.items()}

    return [read_of(batch_of(case, run, step)) for step in range(case.steps)]


def batch_of(case: Case, run: RunConfig, step: int) -> Batch:
    """Draw a random batch of the run's lengths with what its family reads."""
    model, rows, generator = run.model, run.train.global_batch, torch.Generator()
    generator.manual_seed(step + 1)

    def numbers(below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape, generator=generator)

    def chances(chance: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < chance

    def lengths(n: int) -> Tensor:
        """Return True for the first tokens of each row; for all of them if nothing is padded."""
        padded = chances(case.batch["padded"], rows, 1)
        until = torch.where(padded, 1 + numbers(n, rows, 1), n)
        return torch.arange(n) < until

    s = run.seq_len
    if run.task in FINE_TUNING:
        return _fine_tuning(run, numbers, lengths if case.batch["padded"] else None)
    batch = next_words(numbers(model.vocab_size, rows, s + 1))
    ignored = chances(case.batch["ignored"], rows, s)
    if model.two_stacks:
        batch["source"] = numbers(model.vocab_size, rows, run.source_len)
        if case.batch["padded"]:
            batch["source_valid"] = lengths(run.source_len)
            ignored |= ~lengths(s)
    elif case.batch["padded"] and (model.family == "bert" or model.n_labels):
        batch["valid"] = lengths(s)
        ignored |= ~batch["valid"]
    batch["targets"] = torch.where(ignored, IGNORE, batch["targets"])
    if model.family == "bert":
        batch["segments"] = numbers(2, rows, s)
        if model.sentence_pair:
            batch["pair"] = numbers(2, rows)
    if run.data.document_mask and model.two_stacks:
        batch = with_pairs(batch, generator)
    elif run.data.document_mask:
        chance = torch.rand(rows, s, generator=generator)
        batch = with_documents(batch, chance, run.data.reset_positions)
        if run.data.packing == "documents":
            batch["valid"] = lengths(s)
            batch["targets"] = torch.where(batch["valid"], batch["targets"], IGNORE)
    if model.n_labels:
        batch["at"] = numbers(s, rows)
        batch["labels"] = numbers(model.n_labels, rows)
    return batch


def _fine_tuning(
    run: RunConfig, numbers: Callable[..., Tensor], lengths: Callable[[int], Tensor] | None
) -> Batch:
    """Draw a batch of a task with a head of its own.

    Args:
        numbers: Draws numbers below the first argument, of the shape of the others.
        lengths: Draws which tokens of each sample are real; None if all are.
    """
    model, rows, s = run.model, run.train.global_batch, run.seq_len
    shape = (rows, *(run.data.n_choices,) * (run.task == "choice"))
    batch = {"tokens": numbers(model.vocab_size, *shape, s)}
    if model.two_stacks:
        batch["source"] = numbers(model.vocab_size, *shape, s)
    if lengths is not None:
        real = lengths(s).view(rows, *(1,) * (len(shape) - 1), s).expand(*shape, s)
        batch["source_valid" if model.two_stacks else "valid"] = real
    if model.family == "bert":
        batch["segments"] = numbers(2, *shape, s)
    if run.task == "answer":
        return batch | {"answer": numbers(s, rows, 2)}
    batch["at"] = numbers(s, *shape)
    if run.task == "regression":
        return batch | {"labels": numbers(100, rows).float() / 10 - 5}
    most = run.data.n_choices if run.task == "choice" else model.n_labels
    return batch | {"labels": numbers(most, rows)}
