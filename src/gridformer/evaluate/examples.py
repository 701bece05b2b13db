"""Scores of a fine-tuned model on the validation split of a folder of examples, on any layout."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.config import RunConfig, closest
from gridformer.config.data import ValidationConfig
from gridformer.data import Batches, RunData, TokenFolder, resolve
from gridformer.data.resolve import check_set
from gridformer.data.samples.batches import SequentialBatches, alike, open_samples
from gridformer.data.samples.examples import Reading, read_by
from gridformer.data.side_texts import LABELS_FILE
from gridformer.evaluate.loading import Trained, violations_of_layout
from gridformer.evaluate.prompts import read_fields
from gridformer.evaluate.scoring import in_batches, passes_of
from gridformer.parallel.fixes import with_fixes
from gridformer.parallel.validation import violations
from gridformer.train.evaluation import Answers, validation_sets
from gridformer.train.forward_backward import RowSplit
from gridformer.train.loader import BatchLoader
from gridformer.train.metrics import perplexity
from gridformer.train.scorers import scorer_of
from gridformer.utils.batch import Batch
from gridformer.utils.errors import ConfigError, DataError

_OF_TOKENS = ("tokens", "valid", "segments", "context", "source", "source_valid")


def check_examples(path: str, run: RunConfig) -> None:
    """Checks that a folder has examples for the task of a run, and raises what is wrong."""
    folder = TokenFolder.open(Path(path))
    data = run.data.model_copy(
        update={"path": Path(path), "sources": (), "validation": (), "test": ()}
    )
    resolve(run.model_copy(update={"data": data}), folder)


def _warn_of_alike(trained: Trained, batches: Batches) -> None:
    """Prints, once, how many questions have choices that truncation makes equal."""
    for warning in alike(batches) if not trained.axes.world.index else []:
        print(f"{warning}.", file=sys.stderr)


def score_examples(trained: Trained, path: str, batch_size: int) -> dict[str, float]:
    """Returns the scores, on the examples of a folder, that evaluations during training report.

    About `batch_size` examples go through the model together. All processes call it together and
    get the same scores.
    """
    folder = TokenFolder.open(Path(path))
    samples = open_samples(trained.run, folder.val, trained.tokenizer, evaluating=True)
    _warn_of_alike(trained, SequentialBatches(samples, 1))
    scorer = scorer_of(trained.run, folder, folder.val, samples)
    assert scorer is not None, "the run is one of fine-tuning"
    draw = np.random.default_rng(0)  # samples without random choices do not use it

    def batch_of(numbers: Sequence[int], multiple: int) -> Batch:
        read = [samples.sample(number, draw) for number in numbers]
        batch = {key: torch.from_numpy(np.stack([x[key] for x in read])) for key in read[0]}
        # What is padding in all sequences is left out, since models may read far longer ones.
        real = batch["valid" if "valid" in batch else "source_valid"].flatten(0, -2).any(0)
        n = -(-int(real.nonzero().max() + 1) // multiple) * multiple
        more = n - len(real)  # F.pad removes positions if this is negative
        return {k: F.pad(x, (0, more)) if k in _OF_TOKENS else x for k, x in batch.items()}

    def answers(hidden: Tensor, batch: Batch) -> Tensor | None:
        return scorer.answers(trained.model, hidden, batch)

    order = range(scorer.n_samples)
    said = in_batches(trained, order, batch_size, batch_of, answers, scorer.n_columns)
    return scorer.scores(said) | {"documents": folder.val.n_documents}


def read_labeled(path: Path, run: RunConfig, known: Sequence[str] = ()) -> list[tuple[str, int]]:
    """Returns the texts of a file of JSON lines with the keys text and label, and label numbers.

    Labels are numbers or names: those in `known`, or else those that the data of the run has.

    Raises:
        DataError: The file cannot be read, or a label is none of the model's.
    """
    records, n_labels = read_fields(path, "text", "label"), run.model.n_labels
    names = tuple(known)
    if not names and any(isinstance(label, str) for _, label in records):
        try:
            names = TokenFolder.open(run.data.first_path).index.labels
        except DataError:
            raise DataError(
                f"{path}: labels are words, and neither {LABELS_FILE} of the model nor "
                f"{run.data.first_path}, whose names of labels it has learned, is here: write "
                f"numbers from 0 to {n_labels - 1}"
            ) from None
    labeled = []
    for number, (text, label) in enumerate(records, 1):
        value = names.index(label) if label in names else label
        if not isinstance(value, int) or not 0 <= value < n_labels:
            one = f"one of {', '.join(names)}" if names else f"a number from 0 to {n_labels - 1}"
            raise DataError(f"{path}: record {number} has the label {label!r}: write {one}")
        labeled.append((str(text), value))
    return labeled


def predicted(trained: Trained, texts: Sequence[str], batch_size: int) -> list[int]:
    """Returns the most likely label of each text, the same on every process.

    Texts are cut to the length of training; about `batch_size` go through the model together.
    """
    length, special, model = trained.run.seq_len, trained.special, trained.run.model
    tokens = trained.tokenizer.encode_batch(texts)
    if model.family == "bert" or not model.token_head:
        reading = Reading(length, special)
        read = [reading.joined(ids)[0] for ids in tokens]
    else:
        # Documents with labels begin as those of running text, see `prepare --bos`.
        bos = trained.tokenizer.bos_id
        begin = [] if bos is None else [bos]
        read = [[*begin, *ids, special.eos][:length] for ids in tokens]
    at = [0 if model.family == "bert" else len(ids) - 1 for ids in read]
    order = sorted(range(len(texts)), key=lambda i: -len(read[i]))

    def batch_of(numbers: Sequence[int], multiple: int) -> Batch:
        n = -(-max(len(read[i]) for i in numbers) // multiple) * multiple
        rows = [read_by(np.array(read[i]), n, special, model.two_stacks) for i in numbers]
        batch = {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}
        return batch | {"at": torch.tensor([at[i] for i in numbers])}

    def columns(hidden: Tensor, batch: Batch) -> Tensor | None:
        logits = trained.model.branch_logits(hidden, batch)["labels"]
        return None if logits.is_meta else logits.argmax(-1, keepdim=True)

    labels = in_batches(trained, order, batch_size, batch_of, columns, 1)
    return [int(label) for label in labels[:, 0].tolist()]


_ONLY = "val"  # what the validation split of data.path is called, which has no name


def named_sets(run: RunConfig) -> dict[str, ValidationConfig]:
    """Returns the validation and test sets of a run by name.

    A test set that is called like a validation set is `test/NAME`.
    """
    sets = {one.name or _ONLY: one for one in run.data.validation_sets}
    for one in run.data.test_sets:
        sets[f"test/{one.name}" if one.name in sets else one.name] = one
    return sets


def validation_names(run: RunConfig) -> list[str]:
    """Returns the names of the validation sets of a run."""
    return [one.name or _ONLY for one in run.data.validation_sets]


def _find_set(run: RunConfig, name: str) -> ValidationConfig:
    sets = named_sets(run)
    if name not in sets:
        raise ConfigError(f"--set {name}: the run has no such set{closest(name, sets)}")
    return sets[name]


def check_named_set(name: str, run: RunConfig) -> None:
    """Checks whether a model can be evaluated on a set, on the layout of `run`.

    Raises:
        ConfigError: The set is unknown, or does not fit the run or the layout.
        DataError: Its folder is missing or damaged.
    """
    check_set(run, f"--set {name}", RunData.open_set(run.data, _find_set(run, name)))
    problems = [str(problem) for problem in with_fixes(run, violations_of_layout)]
    if problems:
        raise ConfigError(*[f"--set {name}: {text}{_fewer(run)}" for text in problems])


def measure_set(trained: Trained, name: str) -> dict[str, float]:
    """Returns the loss of a set, its parts and its scores, the numbers of metrics.jsonl.

    All processes call it together and get the same numbers. It reads train.eval_batches batches,
    the ones that evaluations during training read; of sets with right answers it reads everything.

    Raises:
        ConfigError: The set is unknown, or has another tokenizer than the model.
    """
    run, model, device = trained.run, trained.model, trained.device
    data = RunData.open_set(run.data, _find_set(run, name))
    if not trained.tokenizer.same_ids(data.first.tokenizer):
        raise ConfigError(
            f"--set {name}: its folder has another tokenizer than the model: prepare it again "
            "with --tokenizer and the run directory"
        )
    (one,) = validation_sets(run, data)
    _warn_of_alike(trained, one.batches)
    model.loss_chunk_tokens = run.train.loss_chunk_tokens
    split = RowSplit(run.train.global_batch, trained.layout.micro_batches, trained.axes)
    answers = None
    if one.scorer is not None:
        answers = Answers(one.scorer, model, trained.axes, device)
    with BatchLoader(one.batches, split.all_rows, one.numbers, device) as ahead:
        reads = [partial(ahead.read, number) for number in one.numbers]
        means = passes_of(trained).mean_losses(split, device, reads, answers)
    numbers = {"loss": means.loss}
    if len(means.losses) > 1:
        numbers |= {f"loss_{part}": loss for part, loss in means.losses.items()}
    if answers is not None:
        numbers |= answers.scores()
    elif "tokens" in means.losses:
        numbers["perplexity"] = perplexity(means.losses["tokens"])
    return numbers | {"batches": len(one.numbers)}


def _fewer(run: RunConfig) -> str:
    """Returns the end of an error: fewer replicas with which the batches of a run fit."""
    for dp in range(run.layout.dp - 1, 0, -1):
        layout = run.layout.model_copy(update={"dp": dp})
        if not violations(run.model_copy(update={"layout": layout})):
            return f"; use layout.dp={dp}"
    return ""
