"""A run on files of Megatron-LM or datatrove is the run on a token folder with the same tokens."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from gridformer.data import TokenFolder
from gridformer.data.tokensplit import TokenSplit
from gridformer.train import journal
from gridformer.train.metrics import read_metrics
from tests.support.commands import gridformer_here
from tests.support.foreign import Documents, write_datatrove, write_megatron


def sentences_of(split: TokenSplit) -> Documents:
    """Return the documents of a split, each in sequences of 7 tokens, as sentences would be."""
    return [[ids[at : at + 7] for at in range(0, len(ids), 7)] for ids in documents_of(split)]


def documents_of(split: TokenSplit) -> list[list[int]]:
    return [split.document(number).tolist() for number in range(split.n_documents)]


def test_two_steps_on_files_of_others(token_folder: Path, tmp_path: Path) -> None:
    """With attention within documents, so that the borders of documents count, too."""
    folder = TokenFolder.open(token_folder)
    foreign = tmp_path / "foreign"
    write_megatron(foreign / "a_text_document", sentences_of(folder.train), code=4)
    write_megatron(foreign / "b_text_document", sentences_of(folder.val), code=8)
    write_datatrove(foreign / "a.ds", documents_of(folder.train), item=4)
    write_datatrove(foreign / "b.ds", documents_of(folder.val), item=2)
    shutil.copy(token_folder / "tokenizer.json", foreign)
    ours: dict[str, Any] = {
        "path": str(token_folder),
        "validation": [{"name": "b", "path": str(token_folder)}],
    }
    runs = {"ours": ours}
    for name, train, val in (
        ("megatron", "a_text_document", "b_text_document.bin"),
        ("datatrove", "a.ds", "b.ds"),
    ):
        runs[name] = {
            "path": str(foreign / train),
            "val_fraction": 0,
            "validation": [{"name": "b", "path": str(foreign / val)}],
        }
    for name, data in runs.items():
        sections = {
            "model": {"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 16},
            "data": {**data, "document_mask": True},
            "train": {"steps": 2, "global_batch": 4, "eval_every": 1, "device": "cpu"},
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(sections))
        with patch.object(journal, "plot_loss"):
            done = gridformer_here("train", tmp_path / f"{name}.yaml", "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
    numbers = [
        [(m["step"], m.get("loss"), m["val_loss_b"]) for m in read_metrics(tmp_path / name)]
        for name in runs
    ]
    assert [step for step, *_ in numbers[0]] == [0, 1, 2]
    assert numbers[0] == numbers[1] == numbers[2]
