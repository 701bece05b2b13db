"""Samples of labeled documents, for both families."""

from typing import Any

import numpy as np
import pytest

from gridformer.data import TokenFolder
from gridformer.data.samples.examples import LabeledForDecoder, LabeledForEncoder
from gridformer.data.samples.special import SpecialIds
from gridformer.utils.batch import IGNORE

DRAW = np.random.default_rng(0)


def text_of(folder: TokenFolder, number: int) -> list[int]:
    return folder.train.document(number).tolist()[:-1]


def the_label(folder: TokenFolder, number: int) -> str:
    """Return a document's first word, which is its label."""
    return folder.tokenizer.decode(text_of(folder, number)).split()[0]


@pytest.mark.parametrize("seq_len", [200, 10])
def test_decoder(labeled_folder: TokenFolder, seq_len: int) -> None:
    special = SpecialIds.of("gpt2", "causal", labeled_folder.tokenizer)
    samples = LabeledForDecoder(labeled_folder.train, seq_len, special)
    assert samples.n_samples == labeled_folder.train.n_documents
    for number in range(samples.n_samples):
        sample: dict[str, Any] = samples.sample(number, DRAW)
        ids = [*text_of(labeled_folder, number), special.eos]
        n = min(len(ids), seq_len)
        assert sample["tokens"][sample["valid"]].tolist() == ids[:n]
        assert sample["at"] == sample["valid"].sum() - 1 == n - 1
        said = ids[1 : seq_len + 1]
        assert sample["targets"].tolist() == said + [IGNORE] * (seq_len - len(said))
        label = labeled_folder.index.labels[sample["labels"]]
        assert label == the_label(labeled_folder, number)


@pytest.mark.parametrize("seq_len", [200, 10])
def test_encoder(labeled_folder: TokenFolder, seq_len: int) -> None:
    special = SpecialIds.of("bert", "masked", labeled_folder.tokenizer)
    samples = LabeledForEncoder(labeled_folder.train, seq_len, special)
    for number in range(samples.n_samples):
        sample: dict[str, Any] = samples.sample(number, DRAW)
        hidden = sample["targets"] != IGNORE
        ids = np.where(hidden, sample["targets"], sample["tokens"])
        text = text_of(labeled_folder, number)[: seq_len - 2]
        assert ids[sample["valid"]].tolist() == [special.cls, *text, special.sep]
        assert (ids[~sample["valid"]] == special.pad).all()
        assert hidden.sum() == max(1, (15 * len(text) + 50) // 100)
        assert sample["at"] == 0
        label = labeled_folder.index.labels[sample["labels"]]
        assert label == the_label(labeled_folder, number)
