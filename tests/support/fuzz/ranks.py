"""Checks that a case of the fuzzer trains exactly as one device."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gridformer.checkpoint import checkpoint, find
from gridformer.config import FINE_TUNING, LayoutConfig, RunConfig
from gridformer.exactness import (
    Tensors,
    differences,
    held,
    keep_gradients,
    trained,
    without_methods,
)
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.data.copies import assert_copies_equal
from gridformer.train.compile import compile_model
from gridformer.train.step import ReadRows, Stepper
from gridformer.utils.batch import IGNORE, Batch, next_words
from tests.support.checkpoints import save_checkpoint
from tests.support.fuzz.case import Case
from tests.support.multirank import own_networks
from tests.support.multirank.exactness import (
    CPU,
    axes_of,
    computed_once,
    rows_of,
    with_documents,
    with_pairs,
)
from tests.support.multirank.pool import RankFailed, WorkerPool

Found = dict[str, float]
# Largest allowed relative differences in float64. `loose` is that of the first loss in another
# type, as a multiple of CLOSE.
LIMIT = {"init": 0.0, "loss": 1e-9, "norm": 1e-9, "gradient": 1e-9, "parameter": 1e-8}
LIMIT |= {"eval": 1e-9, "loose": 1.0}
CLOSE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
# Of torch.compile: the cheapest, since tests/train/test_compile.py runs the others.
BACKEND = "eager"


class CaseFailed(AssertionError):  # noqa: N818 - reads as a sentence in pytest.raises
    """A case that failed, hung or is not exact.

    `kind` says which of these happened, so that failures can be told apart.
    """

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(text)


def check_case(pool: WorkerPool, case: Case, folder: Path) -> float:
    """Train a case, compare it with one device and return the largest difference.

    Raises:
        CaseFailed: The case failed; the message holds the command that runs it again.
    """
    header = f"to run it again: python -m tests.support.fuzz --case '{case.text()}'\n"
    worst = 0.0
    for number, leg in enumerate(case.legs):
        # Code of networks that casts to float32 shall not round where all is compared exactly.
        wide = [own_networks.in_double] if leg.train.dtype == "float64" else []
        try:
            ranks = pool.run(leg.layout.n_processes, *wide, train, case.text(), number, str(folder))
        except RankFailed as failure:
            text = str(failure)
            hangs = "did not finish within" in text
            kind = "hang" if hangs else text.strip().splitlines()[-1][:100]
            raise CaseFailed(kind, f"{header}{text}") from None
        for rank, one in enumerate(ranks):
            wrong = {name: value for name, value in one.items() if not value <= LIMIT[name]}
            if wrong:
                words = f"leg {number}, rank {rank}: {wrong}"
                raise CaseFailed("differs", f"{header}differs from one device: {words}")
            worst = max(worst, *(value for name, value in one.items() if name != "loose"), 0.0)
    return worst


def train(text: str, number: int, folder: str) -> Found:
    """Train one leg of a case, from the start or from a checkpoint in `folder`; one rank's work.

    In low precision it checks that losses are finite and that the first is close to one device's.
    """
    torch.set_num_threads(1)
    case = Case.read(text)
    run = case.legs[number]
    first, end = (case.stop, case.steps) if number else (0, case.stop or case.steps)
    decisions = decide_run(run)
    axes = axes_of(run.layout, decisions.block)
    model = build_parallel(
        run.model, run.layout, axes, run.train.seed, CPU, run.train.dtype, decisions.choices
    )
    if run.train.compile is True:
        torch._dynamo.reset()  # what earlier cases have compiled
        compile_model(model, BACKEND, run.layout.splits_backward)
    stepper = Stepper(model, run.train, axes, run.layout)
    reads = reads_of(case, run)
    exact = run.train.dtype == "float64"
    if exact:
        want: Tensors = computed_once(_one_device, text)
        found = {"init": worst(model, held("initial", model), want), "loss": 0.0, "norm": 0.0}
    else:
        found = {"loose": 0.0}
    if number:
        saved = find.latest(Path(folder))
        assert saved is not None
        loaded = checkpoint.load(saved, model, stepper.updates, axes)
        stepper.scale.skipped = loaded.skipped
        stepper.scale.go_on(loaded.loss_scale, loaded.good_steps)
    mine: Tensors = {}
    if exact:
        keep_gradients(stepper, mine)
    for step in range(first, end):
        got = stepper(step, reads[step])
        assert got.tokens == int(Model.n_tokens(reads[step](slice(None)))), "tokens are counted"
        if exact:
            found["loss"] = max(found["loss"], _relative(got.loss, want[f"loss of step {step}"]))
            norm = _relative(got.grad_norm, want[f"norm of step {step}"])
            found["norm"] = max(found["norm"], norm)
        else:
            assert math.isfinite(got.loss)
            assert got.skipped or math.isfinite(got.grad_norm)
        if step == 0 and exact and not stepper.updates.in_backward:  # which leaves no gradients
            largest = max(float(want[name].abs().max()) for name in want if "gradient" in name)
            found["gradient"] = worst(model, mine, want, largest * 1e-3)
        if step == 0 and not exact:
            loss = computed_once(_first_loss, text)
            found["loose"] = abs(got.loss - loss) / max(1.0, abs(loss)) / CLOSE[run.train.dtype]
    if run.train.sanity_checks:
        assert_copies_equal(model, axes)
    if end < case.steps:
        save_checkpoint(
            Path(folder), end, 0, run, model, stepper.updates, axes, scale=stepper.scale
        )
        return found
    evaluated = stepper.evaluate(reads[::2]).loss
    if exact:
        # Differences of values that are zero except for rounding, relative to the length of a step.
        found["parameter"] = worst(model, held("trained", model), want, run.train.lr)
        found["eval"] = _relative(evaluated, want["evaluated loss"])
    assert math.isfinite(evaluated) or exact
    return found


def worst(model: Model, got: Tensors, want: Tensors, least: float = 0.0) -> float:
    return max(differences(model, got, want, least).values(), default=0.0)


def _one_device(text: str) -> Tensors:
    case = Case.read(text)
    run = case.legs[0]
    return trained(_alone(run), reads_of(case, run))


def _alone(run: RunConfig) -> Stepper:
    """Return a stepper for one device without memory-saving methods."""
    settings = without_methods(run.train)
    whole = build_parallel(run.model, LayoutConfig(), Axes(), settings.seed, CPU, settings.dtype)
    return Stepper(whole, settings, Axes())


def _first_loss(text: str) -> float:
    """Return one device's first loss, in float64."""
    case = Case.read(text)
    run = case.legs[0]
    exact = run.train.model_copy(update={"dtype": "float64"})
    stepper = _alone(run.model_copy(update={"train": exact}))
    return stepper(0, reads_of(case, run)[0]).loss


def _relative(got: float, whole: Tensor) -> float:
    """Return the relative difference, or 1 if one of the two is NaN."""
    want = float(whole)
    difference = abs(got - want) / max(abs(want), 1e-6)
    return difference if math.isfinite(difference) else 1.0


def reads_of(case: Case, run: RunConfig) -> list[ReadRows]:
    return [rows_of(batch_of(case, run, step)) for step in range(case.steps)]


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
