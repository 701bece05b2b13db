"""Token folders of documents that are tokenized already, with columns and given splits."""

from pathlib import Path

import pytest

from gridformer.data import TokenFolder, Tokenizer
from gridformer.data.prepare.split_file import Document
from gridformer.data.prepare.writer import write_documents
from gridformer.data.tokenfolder import SplitName
from gridformer.data.tokensplit import LABEL_COLUMN, LABELS, Column
from gridformer.utils.errors import DataError
from tests.support.data import sentences

TOKENIZER = Tokenizer.train(sentences(200), 300)
COLUMNS = {
    "span": Column(dtype="int32", width=2),
    "loss": Column(per="token", dtype="uint8"),
    LABELS: LABEL_COLUMN,
}


def given(number: int, split: SplitName) -> Document:
    ids = list(range(10, 12 + number))
    values = {"span": [number, -1], "loss": [i % 2 for i in ids] + [1]}
    return Document(ids, values, label="odd" if number % 2 else "even", split=split)


def write(out: Path, documents: list[Document]) -> TokenFolder:
    return write_documents(
        documents, out, tokenizer=TOKENIZER, kind="text", name="mine", columns=COLUMNS
    )


def test_columns_and_given_splits(tmp_path: Path) -> None:
    documents = [given(i, "val" if i in (2, 3, 9) else "train") for i in range(10)]
    folder = write(tmp_path / "t", documents)
    folder.check()
    assert folder.index.labels == ("even", "odd")
    for split, numbers in ((folder.train, [0, 1, 4, 5, 6, 7, 8]), (folder.val, [2, 3, 9])):
        assert split.n_documents == len(numbers)
        assert split.columns["span"].tolist() == [[i, -1] for i in numbers]
        assert split.columns["labels"].tolist() == [i % 2 for i in numbers]
        for place, number in enumerate(numbers):
            ids = documents[number].ids
            start = int(split.offsets[place])
            assert split.document(place).tolist() == [*ids, TOKENIZER.eos_id]
            loss = split.columns["loss"][start : start + len(ids) + 1]
            assert loss.tolist() == [i % 2 for i in ids] + [1]
    # Files of columns are compared with the index like all others.
    file = tmp_path / "t" / "val.span.bin"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"val\.span\.bin: has 20 bytes, expected 24 \(2 int32 val"):
        TokenFolder.open(tmp_path / "t")


def test_both_splits_have_documents(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="mine: there is nothing to prepare"):
        write(tmp_path / "t", [])
    with pytest.raises(DataError, match="mine: there are no documents for the split val"):
        write(tmp_path / "t", [given(i, "train") for i in range(3)])
    assert list(tmp_path.iterdir()) == []
