"""Which documents are held out, that none is lost or split on the way, and their columns."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridformer.data import TokenFolder, Tokenizer
from gridformer.data.indexed import Indexed
from gridformer.data.prepare.split_file import Document, SplitWriter, split_of
from gridformer.data.prepare.writer import FolderSpec, Source, prepare_documents
from gridformer.data.tokenfolder import SPLITS, Kind, SplitName
from gridformer.data.tokensplit import LABEL_COLUMN, LABELS, Column
from gridformer.utils.errors import DataError
from tests.support.data import sentences

EOS = 9
Folders = pytest.TempPathFactory
_ids = st.lists(st.integers(0, 8), min_size=1, max_size=6)
bodies = st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=30), min_size=2, max_size=25)
fractions = st.floats(0.001, 0.999)


def write(
    folder: Path, documents: list[list[int]], seed: int, fraction: float
) -> dict[str, list[list[int]]]:
    """Write documents in two parts each, and return the split documents as read back."""
    with SplitWriter(folder, np.dtype("<u2"), EOS, seed, fraction) as writer:
        for document in documents:
            writer.append(Document(document[:3], ends=False))
            writer.append(Document(document[3:]))
        entries, _ = writer.finish()
    out: dict[str, list[list[int]]] = {}
    for split, entry in entries.items():
        tokens = np.fromfile(folder / f"{split}.bin", "<u2").tolist()
        offsets = Indexed.open(folder / f"{split}.idx").starts().tolist()
        assert offsets[0] == 0
        assert offsets[-1] == len(tokens) == entry.tokens
        assert entry.documents == len(offsets) - 1 >= 1
        out[split] = [tokens[a:b] for a, b in pairwise(offsets)]
    return out


@given(documents=bodies, seed=st.integers(0, 2**63 - 1), fraction=fractions)
def test_documents_stay_whole_and_in_order(
    tmp_path_factory: Folders, documents: list[list[int]], seed: int, fraction: float
) -> None:
    got = write(tmp_path_factory.mktemp("t"), documents, seed, fraction)

    hashed = [split_of(seed, number, fraction) for number in range(len(documents))]
    whole = [[*document, EOS] for document in documents]
    assert got["train"]
    assert got["val"]
    if len(set(hashed)) == 2:
        for split in ("train", "val"):
            assert got[split] == [d for d, where in zip(whole, hashed) if where == split]
    else:
        few, many = sorted(("train", "val"), key=lambda split: len(got[split]))
        if len(documents) > 2:
            assert (few, many) == ("val" if hashed[0] == "train" else "train", hashed[0])
        (moved,) = got[few]
        assert any(
            got[many] == whole[:i] + whole[i + 1 :] and moved == whole[i] for i in range(len(whole))
        )


@given(
    document=st.lists(st.integers(0, 8), min_size=1, max_size=200),
    seed=st.integers(0, 99),
    fraction=fractions,
)
def test_a_single_document_is_cut_by_position(
    tmp_path_factory: Folders, document: list[int], seed: int, fraction: float
) -> None:
    got = write(tmp_path_factory.mktemp("t"), [document], seed, fraction)
    (train,), (val,) = got["train"], got["val"]
    assert [*train, *val] == [*document, EOS]
    n = len(document) + 1
    assert len(val) == min(max(1, round(fraction * n)), n - 1)


def test_the_document_nearest_to_the_share_moves(tmp_path: Path) -> None:
    documents = [[i % 9] * length for i, length in enumerate([100, 40, 60, 80])]
    seed = next(s for s in range(99) if all(split_of(s, d, 0.01) == "train" for d in range(4)))
    got = write(tmp_path, documents, seed, 0.01)
    # The shortest document is nearest to a hundredth of all tokens.
    assert got["val"] == [[*documents[1], EOS]]
    assert got["train"] == [[*documents[i], EOS] for i in (0, 2, 3)]


def test_the_share_is_about_the_fraction() -> None:
    for seed in range(5):
        held_out = sum(split_of(seed, number, 0.1) == "val" for number in range(10_000))
        assert abs(held_out - 1000) < 5 * 30
    # If a corpus is prepared again, by any version, the same documents must be held out.
    held_out_numbers = [n for n in range(150) if split_of(1234, n, 0.05) == "val"]
    assert held_out_numbers == [4, 41, 51, 53, 69, 118, 142, 144, 148]


def test_documents_without_tokens_are_none(tmp_path: Path) -> None:
    with SplitWriter(tmp_path, np.dtype("<u2"), EOS, 0, 0.5) as writer:
        for ids, ends, documents in (([], True, 0), ([], False, 0), ([1], False, 0), ([], True, 1)):
            writer.append(Document(ids, ends=ends))
            assert writer.documents == documents
        assert (writer.documents, writer.tokens) == (1, 2)


@settings(max_examples=60)
@given(
    pairs=st.lists(st.tuples(_ids, _ids), min_size=2, max_size=10),
    seed=st.integers(0, 99),
    fraction=st.floats(0.01, 0.99),
)
def test_pairs_stay_together(
    tmp_path_factory: Folders, pairs: list[tuple[list[int], list[int]]], seed: int, fraction: float
) -> None:
    folder = tmp_path_factory.mktemp("s")
    with SplitWriter(folder, np.dtype("<u2"), EOS, seed, fraction, "pairs") as writer:
        for pair in pairs:
            for text in (*pair, [], []):
                writer.append(Document(text[:1], ends=False))
                assert writer.is_between == (not text)
                writer.append(Document(text[1:]))
                assert writer.is_between
        entries, _ = writer.finish()
    found = []
    for split in SPLITS:
        tokens = np.fromfile(folder / f"{split}.bin", "<u2")
        offsets = Indexed.open(folder / f"{split}.idx").starts().tolist()
        texts = [tokens[a : b - 1].tolist() for a, b in pairwise(offsets)]
        assert len(texts) == entries[split].documents >= 2
        found += list(zip(texts[::2], texts[1::2], strict=True))
    assert sorted(found) == sorted(pairs)


@settings(max_examples=60)
@given(
    labels=st.lists(st.sampled_from(["b", "a", "10", "9"]), min_size=2, max_size=12),
    seed=st.integers(0, 99),
    fraction=st.floats(0.01, 0.99),
)
def test_labels_stay_with_their_documents(
    tmp_path_factory: Folders, labels: list[str], seed: int, fraction: float
) -> None:
    folder = tmp_path_factory.mktemp("s")
    with SplitWriter(folder, np.dtype("<u2"), EOS, seed, fraction, "labeled") as writer:
        for number, label in enumerate(labels):
            writer.append(Document([number], ends=False))
            writer.append(Document([number], label=label))
            writer.append(Document([], label="of nothing"))
        entries, names = writer.finish()
    numbers_only = all(label.isdecimal() for label in labels)
    assert names == tuple(sorted(set(labels), key=int if numbers_only else None))
    seen: dict[int, str] = {}
    for split in SPLITS:
        tokens = np.fromfile(folder / f"{split}.bin", "<u2").reshape(-1, 3)
        found = np.fromfile(folder / f"{split}.labels.bin", "<i4")
        assert len(found) == len(tokens) == entries[split].documents >= 1
        seen |= {int(row[0]): names[label] for row, label in zip(tokens, found)}
    assert [seen[number] for number in range(len(labels))] == labels


@pytest.mark.parametrize(
    ("kind", "said"),
    [("pairs", "only one pair"), ("labeled", "labeled document"), ("text", "only one token")],
)
def test_what_cannot_be_cut(tmp_path: Path, kind: Kind, said: str) -> None:
    eos = None if kind == "text" else EOS
    with SplitWriter(tmp_path, np.dtype("<u2"), eos, 0, 0.1, kind) as writer:
        writer.append(Document([1], label="a" if kind == "labeled" else None))
        if kind == "pairs":
            writer.append(Document([2]))
        with pytest.raises(DataError, match=f"{said}.*prepare more text"):
            writer.finish()


def test_labels_that_are_none(tmp_path: Path) -> None:
    with SplitWriter(tmp_path, np.dtype("<u2"), EOS, 0, 0.1, "labeled") as writer:
        for number in range(10_000):
            writer.append(Document([1], label=f"id-{number}"))
        with pytest.raises(DataError, match=r"more than 10,000 different labels, .*--label-key"):
            writer.append(Document([1], label="one more"))


@settings(max_examples=60)
@given(documents=bodies, seed=st.integers(0, 99), fraction=fractions)
def test_columns_stay_with_their_documents_and_tokens(
    tmp_path_factory: Folders, documents: list[list[int]], seed: int, fraction: float
) -> None:
    folder = tmp_path_factory.mktemp("s")
    columns = {
        "number": Column(dtype="int32", width=2),
        "twice": Column(per="token", dtype="int16"),
    }
    with SplitWriter(folder, np.dtype("<u2"), EOS, seed, fraction, columns=columns) as writer:
        for number, body in enumerate(documents):
            twice = [2 * i for i in body]
            writer.append(Document(body[:2], {"twice": twice[:2]}, ends=False))
            last = {"number": [number, -1], "twice": twice[2:] + [7] * (number % 2)}
            writer.append(Document(body[2:], last))
        entries, _ = writer.finish()
    seen = set()
    for split, entry in entries.items():
        tokens = np.fromfile(folder / f"{split}.bin", "<u2").tolist()
        twice = np.fromfile(folder / f"{split}.twice.bin", "<i2").tolist()
        numbers = np.fromfile(folder / f"{split}.number.bin", "<i4").reshape(-1, 2).tolist()
        starts = Indexed.open(folder / f"{split}.idx").starts().tolist()
        assert len(numbers) == entry.documents
        for (number, filler), (a, b) in zip(numbers, pairwise(starts), strict=True):
            body = documents[number]
            assert filler == -1
            assert tokens[a:b] == [*body, EOS]
            assert twice[a:b] == [2 * i for i in body] + [7 * (number % 2)]
            seen.add(number)
    assert seen == set(range(len(documents)))


def test_values_that_do_not_fit_their_column(tmp_path: Path) -> None:
    columns = {"small": Column(dtype="int8"), "marks": Column(per="token", dtype="uint8")}
    good = {"small": 1, "marks": [1, 0]}
    with SplitWriter(tmp_path, np.dtype("<u2"), EOS, 0, 0.1, columns=columns) as writer:
        writer.append(Document([1, 2], good))
        for wrong, said in (
            ({"small": 128}, "column small of document 1: values 128 to 128 do not fit int8"),
            ({"small": [1, 2]}, "column small of document 1: 2 values, but 1 times 1"),
            ({"marks": [1, 0, 1, 1]}, "column marks of document 1: 4 values, but 3 times 1"),
        ):
            with pytest.raises(DataError, match=said):
                writer.append(Document([1, 2], good | wrong))
        with pytest.raises(DataError, match="column small of document 1: no values, and each doc"):
            writer.append(Document([1, 2], {"marks": [1, 0]}))


TOKENIZER = Tokenizer.train(sentences(200), 300)
COLUMNS = {
    "span": Column(dtype="int32", width=2),
    "loss": Column(per="token", dtype="uint8"),
    LABELS: LABEL_COLUMN,
}


def numbered(number: int, split: SplitName) -> Document:
    ids = list(range(10, 12 + number))
    values = {"span": [number, -1], "loss": [i % 2 for i in ids] + [1]}
    return Document(ids, values, label="odd" if number % 2 else "even", split=split)


def write_given(out: Path, documents: list[Document]) -> TokenFolder:
    tokens: Any = lambda _: lambda items: ([*items], Counter())  # noqa: E731
    spec: FolderSpec[Document] = FolderSpec("text", tokens, lambda d: len(d.ids), columns=COLUMNS)
    source = Source("mine", lambda skipped, cursor: iter(documents))
    return prepare_documents([source], out, spec, TOKENIZER, resumable=False)


def test_columns_and_given_splits(tmp_path: Path) -> None:
    documents = [numbered(i, "val" if i in (2, 3, 9) else "train") for i in range(10)]
    folder = write_given(tmp_path / "t", documents)
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
        write_given(tmp_path / "t", [])
    with pytest.raises(DataError, match="mine: there are no documents for the split val"):
        write_given(tmp_path / "t", [numbered(i, "train") for i in range(3)])
    assert list(tmp_path.iterdir()) == []
