"""How often a model's classifier gives the labels of texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gridformer.config import RunConfig
from gridformer.data import TokenFolder
from gridformer.data.label_names import LABELS_FILE
from gridformer.data.samples.examples import Reading, read_by
from gridformer.evaluate.loading import Trained
from gridformer.evaluate.prompts import read_fields
from gridformer.evaluate.scoring import in_batches
from gridformer.utils.batch import Batch
from gridformer.utils.errors import DataError


def read_labeled(path: Path, run: RunConfig, known: Sequence[str] = ()) -> list[tuple[str, int]]:
    """Returns the texts of a file of JSON lines with the keys text and label, and label numbers.

    Args:
        path: The file. Its labels are numbers or names.
        run: The run that trained the model.
        known: The names of labels 0, 1, ...; if there are none, those that the run's data has.

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
    found = []
    for number, (text, label) in enumerate(records, 1):
        value = names.index(label) if label in names else label
        if not isinstance(value, int) or not 0 <= value < n_labels:
            known = f"one of {', '.join(names)}" if names else f"a number from 0 to {n_labels - 1}"
            raise DataError(f"{path}: record {number} has the label {label!r}: write {known}")
        found.append((str(text), value))
    return found


def predicted(trained: Trained, texts: Sequence[str], batch_size: int) -> list[int]:
    """Returns the most likely label of each text, the same on every process.

    Texts are cut to the length of training.

    Args:
        trained: A model with a classifier.
        texts: The texts.
        batch_size: About how many texts go through the model together.
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
        found = {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}
        return found | {"at": torch.tensor([at[i] for i in numbers])}

    def columns(hidden: Tensor, batch: Batch) -> Tensor | None:
        logits = trained.model.branch_logits(hidden, batch)["labels"]
        return None if logits.is_meta else logits.argmax(-1, keepdim=True)

    found = in_batches(trained, order, batch_size, batch_of, columns, 1)
    return [int(label) for label in found[:, 0].tolist()]
