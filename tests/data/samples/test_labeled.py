"""Samples of labeled documents, for both families."""

from typing import Any

import numpy as np
import pytest

from gridformer.data import TokenFolder
from gridformer.data.samples.examples import LabeledDocuments
from gridformer.data.samples.sample import SpecialIds
from gridformer.utils.batch import IGNORE

DRAW = np.random.default_rng(0)


@pytest.mark.parametrize("seq_len", [200, 10])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_documents(labeled_folder: TokenFolder, family: Any, seq_len: int) -> None:
    """Labels are the first words. A document that is too long is truncated."""
    task: Any = {"gpt2": "causal", "bert": "masked"}[family]
    special, folder = SpecialIds.of(family, task, labeled_folder.tokenizer), labeled_folder
    samples = LabeledDocuments(folder.train, seq_len, special)
    assert samples.n_samples == folder.train.n_documents
    for number in range(samples.n_samples):
        sample: dict[str, Any] = samples.sample(number, DRAW)
        text, valid = folder.train.document(number).tolist()[:-1], sample["valid"]
        said = sample["targets"] != IGNORE
        if family == "gpt2":
            ids = [*text, special.eos]
            assert sample["tokens"][valid].tolist() == ids[:seq_len]
            assert sample["targets"][said].tolist() == ids[1 : seq_len + 1]
            assert said.tolist() == [i < len(ids) - 1 for i in range(seq_len)]
            assert sample["at"] == valid.sum() - 1 == min(len(ids), seq_len) - 1
        else:
            ids, short = np.where(said, sample["targets"], sample["tokens"]), text[: seq_len - 2]
            assert ids[valid].tolist() == [special.cls, *short, special.sep]
            assert (ids[~valid] == special.pad).all()
            assert said.sum() == max(1, (15 * len(short) + 50) // 100)
            assert sample["at"] == 0
        label = folder.index.labels[sample["labels"]]
        assert label == folder.tokenizer.decode(text).split()[0]
