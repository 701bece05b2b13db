"""Losses and scores of the named sets of a run, as evaluations during training compute them."""

from __future__ import annotations

from functools import partial

from gridformer.config import RunConfig, closest
from gridformer.config.mixture import ValidationConfig
from gridformer.data import RunData, Tokenizer
from gridformer.data.resolve import check_set, same_tokenizer
from gridformer.evaluate.examples import warn_of_alike
from gridformer.evaluate.job import of_layout
from gridformer.evaluate.loading import Trained
from gridformer.evaluate.scoring import passes_of
from gridformer.parallel.offers import Broken, with_offers
from gridformer.parallel.validation import broken_rules
from gridformer.train.evaluation import Answers
from gridformer.train.forward_backward import RowSplit, mean_losses
from gridformer.train.loader import BatchLoader
from gridformer.train.metrics import perplexity
from gridformer.train.scorers import validation_sets
from gridformer.utils.errors import ConfigError

_ONLY = "val"  # what the validation split of data.path is called, which has no name


def named_sets(run: RunConfig) -> dict[str, ValidationConfig]:
    """Returns the validation and test sets of a run by name.

    A test set that is called like a validation set is `test/NAME`.
    """
    found = {one.name or _ONLY: one for one in run.data.validation_sets}
    for one in run.data.test_sets:
        found[f"test/{one.name}" if one.name in found else one.name] = one
    return found


def find_set(run: RunConfig, name: str) -> ValidationConfig:
    """Returns the set of a name.

    Raises:
        ConfigError: The run has none of this name.
    """
    sets = named_sets(run)
    if name not in sets:
        raise ConfigError([f"--set {name}: the run has no such set{closest(name, sets)}"])
    return sets[name]


def check_named_set(name: str, run: RunConfig) -> None:
    """Checks whether a model can be evaluated on a set, on the layout of `run`.

    Raises:
        ConfigError: The set is unknown or does not fit the run, or its batches do not fit the
            layout.
        DataError: Its folder is missing or damaged.
    """
    one = find_set(run, name)
    check_set(run, f"--set {name}", RunData.open_set(run.data, one))
    problems = [str(problem) for problem in with_offers(run, _broken_rules)]
    if problems:
        raise ConfigError([f"--set {name}: {text}{_fewer(run)}" for text in problems])


def same_as_trained(trained: Trained, tokenizer: Tokenizer, name: str) -> None:
    """Refuses a set whose tokens are not those of a model.

    Args:
        trained: The model.
        tokenizer: That of the set.
        name: The name of the set.

    Raises:
        ConfigError: The set has another tokenizer than the model.
    """
    if not same_tokenizer(trained.tokenizer, tokenizer):
        raise ConfigError(
            [
                f"--set {name}: its folder has another tokenizer than the model: prepare it again "
                "with --tokenizer and the run directory"
            ]
        )


def measure_set(trained: Trained, name: str) -> dict[str, float]:
    """Returns the loss of a set, its parts and its scores, the numbers of metrics.jsonl.

    All processes call it together and get the same numbers. It reads train.eval_batches batches,
    the ones that evaluations during training read; of sets with right answers it reads everything.

    Args:
        trained: The model.
        name: The name of the set.
    """
    run, model, device = trained.run, trained.model, trained.device
    data = RunData.open_set(run.data, find_set(run, name))
    same_as_trained(trained, data.first.tokenizer, name)
    (one,) = validation_sets(run, data)
    warn_of_alike(trained, one.batches)
    model.loss_chunk_tokens = run.train.loss_chunk_tokens
    split = RowSplit(run.train.global_batch, trained.layout.micro_batches, trained.axes)
    answers = None
    if one.scorer is not None:
        answers = Answers(one.scorer, model, trained.axes, device)
    with BatchLoader(one.batches, split.all_rows, one.numbers, device) as ahead:
        reads = [partial(ahead.read, number) for number in one.numbers]
        found = mean_losses(model, passes_of(trained), split, device, reads, answers)
    numbers = {"loss": found.loss}
    if len(found.losses) > 1:
        numbers |= {f"loss_{part}": loss for part, loss in found.losses.items()}
    if answers is not None:
        numbers |= answers.scores()
    elif "tokens" in found.losses:
        numbers["perplexity"] = perplexity(found.losses["tokens"])
    return numbers | {"batches": len(one.numbers)}


def _fewer(run: RunConfig) -> str:
    """Returns the end of an error: fewer replicas with which the batches of a run fit."""
    for dp in range(run.layout.dp - 1, 0, -1):
        fewer = run.model_copy(update={"layout": run.layout.model_copy(update={"dp": dp})})
        if not broken_rules(fewer):
            return f"; use layout.dp={dp}"
    return ""


def _broken_rules(run: RunConfig) -> list[Broken]:
    """Returns the broken rules, with ways to fix them that change only the layout."""
    return [
        Broken(one.rule, one.text, [of_layout(way) for way in one.ways])
        for one in broken_rules(run)
    ]
