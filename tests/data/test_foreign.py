"""Token files of Megatron-LM and datatrove, read in place, and what is said of damaged ones."""

import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gridformer.data import TokenFolder, Tokenizer, resolve
from gridformer.data.foreign import open_tokens
from gridformer.data.run_data import fingerprint
from gridformer.utils.errors import DataError
from tests.support.data import a_run, open_batches, sentences
from tests.support.foreign import Documents, put, shorter, without, write_datatrove, write_megatron

TOKENIZER = Tokenizer.train(sentences(200), 300)
SMALL = [[[i % 100 + j for j in range(i % 7 + 1)]] for i in range(40)]
# The second document consists of three sequences, and the fourth of none.
UNEVEN: Documents = [[[1, 2, 3]], [[4], [5, 6], [7]], [[8, 9]], [], [[10]], [[11, 12]]]


def flat(documents: Documents) -> list[list[int]]:
    return [[i for sequence in document for i in sequence] for document in documents if document]


def read(folder: TokenFolder) -> list[list[int]]:
    splits = (folder.train, folder.val)
    return [split.document(d).tolist() for split in splits for d in range(split.n_documents)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    TOKENIZER.save(tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("documents", [SMALL, UNEVEN])
def test_every_dtype_of_megatron(
    tmp_path: Path, tokenizer: Path, code: int, documents: Documents
) -> None:
    prefix = write_megatron(tmp_path / "corpus" / "my_text_document", documents, code)
    folder = open_tokens(prefix, tokenizer, 0.1)
    folder.check()
    assert isinstance(folder.train.tokens, np.memmap)
    assert read(folder) == flat(documents)
    assert folder.val.n_tokens >= 0.1 * sum(map(len, flat(documents)))
    assert folder.val.document_length(0) == len(flat(documents)[folder.train.n_documents])
    assert folder.val.offsets[-1] == folder.val.n_tokens


def test_names_and_tokenizers_of_megatron_files(tmp_path: Path, tokenizer: Path) -> None:
    prefix = write_megatron(tmp_path / "t" / "a.b_document", SMALL, modes=True)
    for path in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        for given in (tokenizer, tmp_path):
            assert read(open_tokens(path, given)) == flat(SMALL)
    with pytest.raises(DataError, match=r"b_document\.bin: its tokenizer is not known: set data\."):
        open_tokens(prefix)
    shutil.copy(tokenizer, tmp_path / "t")
    assert open_tokens(prefix).tokenizer.vocabulary == TOKENIZER.vocabulary


@pytest.mark.parametrize("item", [2, 4])
def test_datatrove(tmp_path: Path, tokenizer: Path, item: int) -> None:
    file = write_datatrove(tmp_path / "t" / "000_shuffled.ds", flat(SMALL), item)
    for path in (file, tmp_path / "t"):
        folder = open_tokens(path, tokenizer)
        folder.check()
        assert read(folder) == flat(SMALL)
    write_datatrove(tmp_path / "t" / "001_shuffled.ds", flat(SMALL), item)
    with pytest.raises(DataError, match=r"holds 2 files of datatrove, .* name one of them"):
        open_tokens(tmp_path / "t", tokenizer)
    (tmp_path / "t" / "000_shuffled.ds.index").write_bytes(struct.pack("<2Q", 5, 6))
    with pytest.raises(DataError, match=r"0_shuffled\.ds: has \d+ bytes, but .* gives it 6 tokens"):
        open_tokens(file, tokenizer)
    (tmp_path / "t" / "000_shuffled.ds.index").unlink()
    with pytest.raises(DataError, match=r"ds\.index: is missing"):
        open_tokens(file, tokenizer)


def test_what_is_held_out(tmp_path: Path, tokenizer: Path) -> None:
    prefix = write_megatron(tmp_path / "t", SMALL)
    total = sum(map(len, flat(SMALL)))
    for fraction in (0.001, 0.3, 0.999):
        folder = open_tokens(prefix, tokenizer, fraction)
        again = open_tokens(prefix, tokenizer, fraction)
        assert folder.train.n_documents == again.train.n_documents >= 1
        assert folder.val.n_documents >= 1
        assert folder.train.n_tokens + folder.val.n_tokens == total
    none = open_tokens(prefix, tokenizer, 0.0)
    assert (none.train.n_tokens, none.val.n_tokens, none.val.n_documents) == (total, 0, 0)
    every = open_tokens(prefix, tokenizer, 1.0)
    assert (every.train.n_documents, every.val.n_tokens) == (0, total)
    assert read(every) == read(none) == flat(SMALL)
    alone = write_megatron(tmp_path / "one", [[list(range(100))]])
    assert open_tokens(alone, tokenizer, 0.001).val.n_tokens == 1
    one = open_tokens(alone, tokenizer, 0.1)
    assert (one.train.n_tokens, one.val.n_tokens) == (90, 10)
    assert one.val.document(0).tolist() == list(range(90, 100))
    for folder in (none, every, one):
        entries = zip((folder.index.train, folder.index.val), (folder.train, folder.val))
        assert all(entry.documents == split.n_documents for entry, split in entries)


def test_the_same_batches_as_from_a_folder(text_folder: TokenFolder, tmp_path: Path) -> None:
    """Files with the tokens of a folder's training split give the folder's batches."""
    train = text_folder.train
    documents = [[train.document(d).tolist()] for d in range(train.n_documents)]
    prefix = write_megatron(tmp_path / "t", documents, code=4)
    foreign = open_tokens(prefix, text_folder.path / "tokenizer.json", 0.0)
    runs = [a_run(folder, model__vocab_size=300) for folder in (text_folder, foreign)]
    both = open_tokens(prefix, text_folder.path, 0.3)
    assert resolve(a_run(both), both).model.vocab_size == 300
    one = open_batches(runs[0], text_folder, "train")
    other = open_batches(runs[1], foreign, "train")
    for step in (0, 1, 7):
        a, b = one.batch(step), other.batch(step)
        assert all(np.array_equal(a[key], b[key]) for key in a)


def test_a_prepared_folder_is_one_of_megatron(text_folder: TokenFolder) -> None:
    """PREFIX may be FOLDER/train, whose files Megatron-LM reads."""
    folder = open_tokens(text_folder.path / "train", None, 0.0)
    assert np.array_equal(folder.train.tokens, text_folder.train.tokens)
    assert np.array_equal(folder.train.offsets, text_folder.train.offsets)


def test_another_fingerprint(tmp_path: Path, tokenizer: Path) -> None:
    prefix = write_megatron(tmp_path / "t", SMALL)
    there = fingerprint(open_tokens(prefix, tokenizer))
    assert fingerprint(open_tokens(prefix, tokenizer)) == there
    moved = fingerprint(open_tokens(prefix, tokenizer, 0.5))
    assert any("tokens of val is" in said for said in moved.differences(there))
    write_megatron(prefix, [[[1]], *SMALL[1:]])
    write_megatron(prefix, [[[9]], *SMALL[1:]])
    changed = fingerprint(open_tokens(prefix, tokenizer))
    assert changed.differences(there) == ["the contents of t.bin changed"]


in_index = partial(put, "t.idx")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (in_index(0, b"TNTIDX"), r"t\.idx: is not an index of Megatron-LM"),
        (in_index(9, b"\x02"), r"t\.idx: has version 2; only version 1 is read"),
        (in_index(17, b"\x07"), r"t\.idx: describes tokens of float32; tokens are whole numbers"),
        (in_index(17, b"\x63"), r"t\.idx: describes tokens of the unknown dtype 99"),
        (in_index(17, b"\x05"), r"t\.idx: sequence 0 .* the next begins|t\.bin: has .* bytes"),
        (in_index(18, b"\x00" * 8), r"t\.idx: has no documents"),
        (in_index(18, b"\x27"), r"t\.idx: has \d+ bytes, expected \d+ for its 39 sequences"),
        (in_index(34, b"\x02"), r"t\.idx: sequence 0 begins at byte 0 and has 2 tokens of uint16"),
        (in_index(34 + 160 + 320 + 8, b"\x09"), r"t\.idx: document 1 begins after the next one"),
        (in_index(34 + 160 + 320, b"\x01"), r"t\.idx: .* its documents run from sequence 1 to 40"),
        (shorter("t.idx", 1), r"t\.idx: has \d+ bytes, expected"),
        (shorter("t.idx", 10_000), r"t\.idx: is not an index"),
        (shorter("t.bin", 2), r"t\.bin: has \d+ bytes, expected \d+ \(\d+ tokens of uint16, as t"),
        (without("t.bin"), r"t\.bin: is missing"),
        (without("t.idx"), r"t\.idx: is missing, and without it t\.bin cannot be read"),
        (put("t.bin", 0, b"\xff" * 9), "token 65535 outside"),
        (lambda f: write_megatron(f / "t", [[[1, -2, 3]], [[4]]], 4), "token -2 outside the voc"),
    ],
)
def test_damaged(
    tmp_path: Path, tokenizer: Path, damage: Callable[[Path], None], message: str
) -> None:
    prefix = write_megatron(tmp_path / "t", SMALL)
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        open_tokens(prefix, tokenizer).check()


def test_a_folder_has_its_own_tokenizer(
    text_folder: TokenFolder, tmp_path: Path, tokenizer: Path
) -> None:
    assert open_tokens(text_folder.path, text_folder.path).path == text_folder.path
    Tokenizer.train(sentences(50), 270).save(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"is not the tokenizer with which .* was written: omit"):
        open_tokens(text_folder.path, tokenizer)
