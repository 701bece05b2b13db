"""Scores of a fine-tuned model on the validation split of a folder of examples, on any layout."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.config import FINE_TUNING, RunConfig
from gridformer.data import Batches, TokenFolder, resolve
from gridformer.data.samples.batches import SequentialBatches, alike, open_samples
from gridformer.evaluate.loading import Trained
from gridformer.evaluate.scoring import in_batches
from gridformer.train.scorers import scorer_of
from gridformer.utils.batch import Batch

_OF_TOKENS = ("tokens", "valid", "segments", "context", "source", "source_valid")


def check_examples(path: str, run: RunConfig) -> None:
    """Checks that a folder has examples for the task of a run.

    Raises:
        ConfigError, DataError: It does not.
    """
    folder = TokenFolder.open(Path(path))
    data = run.data.model_copy(
        update={"path": Path(path), "sources": (), "validation": (), "test": ()}
    )
    resolve(run.model_copy(update={"data": data}), folder)


def example_problem(run: RunConfig) -> str:
    """Returns why a model cannot be scored on examples, or an empty text."""
    if run.task in FINE_TUNING:
        return ""
    return f"needs a model that was fine-tuned, not one that learned data.task={run.task}"


def warn_of_alike(trained: Trained, batches: Batches) -> None:
    """Prints, once, how many questions have choices that truncation makes equal."""
    for warning in alike(batches) if not trained.axes.world.index else []:
        print(f"{warning}.", file=sys.stderr)


def score_examples(trained: Trained, path: str, batch_size: int) -> dict[str, float]:
    """Returns the scores that evaluations during training report.

    All processes call it together and get the same scores.

    Args:
        trained: The model.
        path: The folder.
        batch_size: About how many examples go through the model together.
    """
    folder = TokenFolder.open(Path(path))
    samples = open_samples(trained.run, folder.val, trained.tokenizer, evaluating=True)
    warn_of_alike(trained, SequentialBatches(samples, 1))
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
    found = in_batches(trained, order, batch_size, batch_of, answers, scorer.n_columns)
    return scorer.scores(found) | {"documents": folder.val.n_documents}
