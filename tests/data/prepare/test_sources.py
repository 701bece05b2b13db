"""Every kind of SOURCE: what is read and left out, and the messages where there is nothing."""

import gzip
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridformer.data.prepare import reading
from gridformer.data.prepare.reading import Cursor, TextSource, pieces
from gridformer.data.prepare.sources import open_sources, python_stdlib
from gridformer.data.tokenizer import Tokenizer
from gridformer.utils.errors import DataError, UserError
from tests.support.data import sentences, texts
from tests.support.marks import extra

Files = Mapping[str, str | bytes]


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def write(folder: Path, files: Files) -> None:
    """Write files; those whose names end with .gz are compressed, unless they are bytes."""
    for name, content in files.items():
        raw = content.encode() if isinstance(content, str) else content
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        zipped = name.endswith(".gz") and isinstance(content, str)
        (folder / name).write_bytes(gzip.compress(raw) if zipped else raw)


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


TREE: Files = {
    **{"b.txt": "bee", "a.md": "ay", "sub/c.py": "see", "sub/d.xyz": "dee"},
    **{".git/e.txt": "hidden", ".f.txt": "hidden"},
}
RECORDS: list[dict[str, Any]] = [
    {"text": "one\nline", "body": "1"},
    {"text": "", "body": "2"},
    {"text": None, "body": "3"},
    {"text": "two", "body": "4"},
]
LINES = lines(*RECORDS).replace("\n{", "\n\n{")
PAIRS: list[dict[str, Any]] = [
    {"en": " one ", "de": "eins"},
    {"en": "two", "de": ""},
    {"en": None, "de": "drei"},
    {"en": "four", "de": "vier"},
]
FOUR = ["one", "eins", "four", "vier"]
NESTED = lines(*({"translation": pair} for pair in PAIRS))
LABELED = lines(
    {"text": "good", "stars": 5},
    {"text": "bad", "stars": 1},
    {"text": "who knows", "stars": None},
    {"text": "", "stars": 3},
)
EN_DE: dict[str, Any] = {"pair_keys": ("en", "de")}
# U+2028 ends a line for str.splitlines, and must not move all lines after it.
PARALLEL: Files = {
    "train.en": "\ufeffa cat\ntwo \u2028 lines\n\nno German\nend\n",
    "train.de.gz": "eine Katze\nzwei Zeilen\nleer\n\nEnde\n",
}
NO_TEXT, NO_PAIR = {"records without text": 2}, {"pairs without one of the texts": 2}
DAMAGED = "with bytes that are not UTF-8 text (first: "
DUTCH: Files = {
    "nl.po": 'msgid "one two three four"\nmsgstr "een twee drie vier"\n',
    "a.jsonl": lines(*PAIRS),
}
# The files, the sources, their options, the texts, and the counts of what is left out.
READ: dict[str, Any] = {
    "a folder in order": (TREE, ["."], {}, ["ay", "bee", "see"],
        {"files of other kinds (.xyz 1; see --suffix)": 1}),
    "many kinds": ({"a.txt": "ok", "README": "", "MAKE": "", **{f"b.{n}": "" for n in range(6)}},
        ["."], {}, ["ok"],
        {"files of other kinds (no suffix 2, .0 1, .1 1, .2 1, .3 1, ...; see --suffix)": 8}),
    "suffixes": (TREE, ["."], {"suffixes": [".txt", "xyz"]}, ["bee", "dee"],
        {"files of other kinds (.md 1, .py 1; see --suffix)": 2}),
    "a pattern": (TREE, ["**/*.[px]y*"], {}, ["see", "dee"], {}),
    "bytes": ({"t.txt": b"\xef\xbb\xbfcaf\xc3\xa9 \xff\r\n"},
        ["t.txt"], {}, ["café \ufffd\r\n"], {f"documents {DAMAGED}t.txt)": 1}),
    "not UTF-8": (
        {"a.txt": "good \ufffd", "b.txt": "äx".encode("latin-1"), "c.txt": b"cut off \xc3"},
        ["."], {}, ["good \ufffd", "\ufffdx", "cut off \ufffd"],
        {f"documents {DAMAGED}b.txt)": 2},
    ),
    # The first chunk of the third looks like text, but nothing of the file may be read.
    "binary": ({"a.txt": "ok", "b.txt": b"\0", "c.txt": b"x" * reading._CHUNK + b"\0"},
        ["."], {}, ["ok"], {reading.BINARY: 2}),
    "compressed": ({"t.txt.gz": "squeezed"}, ["."], {}, ["squeezed"], {}),
    "JSON lines": ({"r.jsonl": LINES}, ["."], {}, ["one\nline", "two"], NO_TEXT),
    "another key": ({"r.jsonl": LINES}, ["r.jsonl"], {"text_key": "body"},
        ["1", "2", "3", "4"], {}),
    "compressed lines": ({"r.jsonl.gz": LINES}, ["."], {}, ["one\nline", "two"], NO_TEXT),
    "lines that are not UTF-8": (
        {"t.jsonl": b'{"text": "a"}\n{"text": "\xe4"}\n{"text": "\xf6"}\n'},
        ["t.jsonl"], {}, ["a", "\ufffd", "\ufffd"], {f"lines {DAMAGED}t.jsonl, line 2)": 2},
    ),
    "pairs": ({"a.jsonl": lines(*PAIRS)}, ["a.jsonl"], EN_DE, FOUR, NO_PAIR),
    "only records": ({"a.jsonl": lines(*PAIRS), "a.txt": "x"}, ["."], EN_DE, FOUR,
        {**NO_PAIR, "files of other kinds (.txt 1; see --suffix)": 1}),
    "keys inside of keys": ({"a.jsonl": NESTED}, ["a.jsonl"],
        {"pair_keys": ("translation.en", "translation.de")}, FOUR, NO_PAIR),
    "lines of two files": (PARALLEL, ["train.en", "train.de.gz"], {"pair_files": True},
        ["a cat", "eine Katze", "two \u2028 lines", "zwei Zeilen", "end", "Ende"], NO_PAIR),
    "catalogs and records": ({"de.po": DUTCH["nl.po"], "a.jsonl": lines(*PAIRS)},
        ["gettext:de:.", "a.jsonl"], EN_DE,
        ["one two three four", "een twee drie vier", *FOUR], NO_PAIR),
    "labels": ({"a.jsonl": LABELED}, ["a.jsonl"], {"label_key": "stars"}, ["good", "bad"],
        {"records without a label": 1, "records without text": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_is_read_and_left_out(tmp_path: Path, name: str) -> None:
    files, specs, options, want, left_out = READ[name]
    write(tmp_path, files)
    skipped: Counter[str] = Counter()
    sources = open_sources(specs, **options)
    assert texts(sources, skipped) == want
    assert skipped == left_out
    source = sources[-1]
    kind = "labeled" if "label_key" in options else "pairs" if "pair" in str(options) else "text"
    assert (source.kind, source.languages) == (kind, ("en", "de") if kind == "pairs" else None)
    assert (source.n_bytes is None) == any(file.suffix == ".gz" for file in source.files)


BAD_LINES = {
    '{"text": "cut': "line 2: is not JSON",
    "[1, 2]": "line 2: is list, not an object",
    '{"body": "x", "id": 1}': "line 2: has no 'text'; .*--text-key, there are body, id",
    '{"text": 7}': "line 2: 'text' holds int, not text",
}
TWO: Files = {"a.en": "x\ny\n", "a.de": "x\ny\nz\n"}
PARALLEL_FILES: dict[str, Any] = {"pair_files": True}
REFUSED: list[Any] = [
    (TREE, ["."], {"suffixes": ["rs"]}, r"no file that ends in \.rs; there are \.md, .*--suffix"),
    ({}, ["."], {}, "there are no files"),
    ({}, ["wikitext"], {}, r"wikitext: no such .* hf:wikitext"),
    ({}, [], {}, "at least one source"),
    ({}, ["python-stdib"], {}, "python-stdib: no such .*: did you mean 'python-stdlib'"),
    ({"notes/a": ""}, ["notess"], {}, "^notess: no such file or folder: did you mean 'notes'"),
    ({"notes/a": ""}, ["nots/"], {}, "^nots/: no such file or folder: did you mean 'notes'"),
    ({"t.txt.gz": gzip.compress(b"squeezed" * 1000)[:-9]},
        ["."], {}, r"t\.txt\.gz: cannot be read"),
    *(
        ({"r.jsonl": '{"text": "fine"}\n' + line}, ["r.jsonl"], {}, said)
        for line, said in BAD_LINES.items()
    ),
    ({"a.jsonl": NESTED}, ["a.jsonl"], {"pair_keys": ("translation.en", "translation.fr")},
        r"has no 'translation.fr'; name the two .* --pair-keys"),
    ({"a.jsonl": LABELED}, ["a.jsonl"], {"label_key": "star"},
        r"has no 'star'; name the label with --label-key.* stars"),
    ({"a.jsonl": LABELED}, ["a.jsonl"], {"pair_keys": ("text", "stars")},
        "'stars' holds int, not text.*--pair-keys"),
    ({"a.jsonl": lines({"text": "a", "x": 0.5})}, ["a.jsonl"], {"label_key": "x"},
        "'x' holds float; a label is .*--label-key"),
    ({"a.txt": "x"}, ["a.txt"], {"label_key": "x"}, "labels are read .*--labels-from-folders"),
    ({"a.txt": "x"}, ["a.txt"], EN_DE, r"pairs are read from the records of \.jsonl"),
    (TWO, ["a.en", "a.de"], PARALLEL_FILES, r"a\.en: ends after 2 lines, but a\.de has more"),
    (TWO, ["a.en"], PARALLEL_FILES, "there are 1 sources: write, for instance, train.en train.de"),
    (TWO, ["a.en", "a.en"], PARALLEL_FILES, "does not translate itself"),
    (TWO, ["a.en", "."], PARALLEL_FILES, "no such file, and --pair-files reads"),
    (TWO, ["a.en", "a.de"], PARALLEL_FILES | EN_DE, "--pair-keys and --pair-files exclude each"),
    (DUTCH, ["a.jsonl"], EN_DE | {"label_key": "x"}, "--pair-keys and --label-key exclude each"),
    ({}, ["python-stdlib"], {"label_key": "x"}, "python-stdlib: --label-key has no effect there"),
    (TREE, ["sub"], {"labels_from_folders": True}, "no folders whose names are labels"),
    (TREE, ["b.txt"], {"labels_from_folders": True}, "--labels-from-folders has no effect there"),
    (DUTCH, ["gettext:nl:nl.po", "a.jsonl"], {}, r"holds pairs, a\.jsonl holds text: prepare them"),
    (DUTCH, ["gettext:nl:nl.po", "a.jsonl"], EN_DE,
        r"translates en to nl, a\.jsonl en to de: prepare them"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "specs", "options", "said"), REFUSED)
def test_what_is_refused(
    tmp_path: Path, files: Files, specs: list[str], options: dict[str, Any], said: str
) -> None:
    write(tmp_path, files)
    with pytest.raises(UserError, match=said):
        texts(open_sources(specs, **options))


def test_samples_are_the_same_documents_in_another_order(tmp_path: Path) -> None:
    names = [f"{i:02}" for i in range(30)]
    write(tmp_path, {f"t/{name}.txt": name for name in names})
    write(tmp_path, PARALLEL)
    (source,) = open_sources(["t"])
    sample = [item.text for item in source.sampled()]
    assert sorted(sample) == names
    assert sample != names
    (both,) = open_sources(["train.en", "train.de.gz"], pair_files=True)
    sample = [text for item in both.sampled() for text in item.texts if text]
    assert sorted(sample) == sorted([*texts([both]), "leer", "no German"])


@pytest.mark.parametrize("first", [1, reading._CHUNK])
def test_damage_at_the_end_of_a_chunk(tmp_path: Path, first: int) -> None:
    latin = "a" * (first - 1) + "äx"
    write(tmp_path, {"b.txt": b"\xef\xbb\xbf" + latin.encode("latin-1")})
    skipped: Counter[str] = Counter()
    assert texts(open_sources(["b.txt"]), skipped) == ["a" * (first - 1) + "\ufffdx"]
    assert skipped == {f"documents {DAMAGED}b.txt)": 1}


def test_long_files_come_in_chunks_and_characters_stay_whole(tmp_path: Path) -> None:
    text = "é" * (reading._CHUNK + 1)  # two bytes each: a chunk ends inside a character
    write(tmp_path, {"t.txt": "a" + text})
    (source,) = open_sources(["t.txt"])
    out = list(source.read(Counter(), Cursor()))
    assert len(out) > 10
    assert "".join(chunk.text for chunk in out) == "a" + text
    assert source.n_bytes == (tmp_path / "t.txt").stat().st_size


def test_files_that_vanish_and_links_that_lead_nowhere(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "a"})
    os.symlink(tmp_path / "gone", tmp_path / "b.txt")
    (source,) = open_sources(["."])
    assert [path.name for path in source.files] == ["a.txt"]
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a\.txt: cannot be read \(No such file"):
        texts([source])


@pytest.mark.parametrize("name", ["r.jsonl.gz", "r.en.gz"])
def test_a_line_that_is_too_long_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .gz of 14 MB may hold one line of 3 GB."""
    monkeypatch.setattr(reading, "LONGEST_LINE", 1 << 20)
    long = '{"text": "fine"}\n{"text": "' + "x" * (1 << 20) + '"}\n'
    write(tmp_path, {name: long, "r.de.gz": "fine\nfine\n"})
    pairs = ["r.de.gz"] if "en" in name else []
    with pytest.raises(DataError, match=r"line 2: has more than 1,048,576 bytes: write one"):
        texts(open_sources([name, *pairs], pair_files=bool(pairs)))


def labels(source: TextSource) -> list[tuple[str, str | None]]:
    return [(item.text, item.label) for item in source.read(Counter(), Cursor())]


def test_labels_of_records_and_folders(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": LABELED, "r/readme.txt": ""})
    names = ["neg/a.txt", "neg/deep/b.txt", "pos/c.txt"]
    write(tmp_path, {f"r/{name}": name for name in names})
    (source,) = open_sources(["a.jsonl"], label_key="stars")
    assert labels(source) == [("good", "5"), ("bad", "1")]
    (source,) = open_sources(["r"], labels_from_folders=True)
    assert labels(source) == [(name, name[:3]) for name in names]
    assert source.kind == "labeled"


# --------------------------------------------------------------------------- Hugging Face


def _table() -> Any:
    columns = {key: [record[key] for record in RECORDS] * 50 for key in ("text", "body")}
    return extra("datasets").Dataset.from_dict(columns)


def test_saved_data_sets() -> None:
    datasets = extra("datasets")
    _table().save_to_disk("one")
    datasets.DatasetDict(train=_table(), test=_table().select([3])).save_to_disk("two")
    assert texts(open_sources(["one"])) == ["one\nline", "two"] * 50
    assert texts(open_sources(["two"], split="test")) == ["two"]
    assert texts(open_sources(["two"], split="test", text_key="body")) == ["4"]
    with pytest.raises(UserError, match="no split 'dev'; use --split train or test"):
        open_sources(["two"], split="dev")
    with pytest.raises(DataError, match=r"has no 'content'; .* there are body, text"):
        texts(open_sources(["one"], text_key="content"))


@pytest.mark.parametrize(
    ("said", "kept"), [("", None), (None, None), ("mit", "mit"), (["mit", "bsd"], "mit, bsd")]
)
def test_licenses(monkeypatch: pytest.MonkeyPatch, said: Any, kept: str | None) -> None:
    table = _table()
    table.info.license = said
    monkeypatch.setattr(extra("datasets"), "load_dataset", lambda *_, **__: table)
    assert open_sources(["hf:x"])[0].license == kept


def test_tables(tmp_path: Path) -> None:
    _table().to_parquet("t.parquet")
    _table().save_to_disk("saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    for path in ("t.parquet", str(arrow)):
        skipped: Counter[str] = Counter()
        assert texts(open_sources([path]), skipped) == ["one\nline", "two"] * 50
        assert skipped == {"records without text": 100}
    write(tmp_path, {"t.parquet": "not a table"})
    with pytest.raises(DataError, match=r"t\.parquet: "):
        texts(open_sources(["t.parquet"]))


def test_tables_of_pairs_and_labels() -> None:
    datasets = extra("datasets")
    text = datasets.Value("string")
    names = datasets.ClassLabel(names=["neg", "pos"])
    features = {"translation": {"en": text, "de": text}, "text": text, "label": names}
    table = datasets.Dataset.from_dict(
        {"translation": PAIRS, "text": ["a", "b", "c", "d"], "label": [1, 0, -1, 1]},
        features=datasets.Features(features),
    )
    table.to_parquet("a.parquet")
    keys = ("translation.en", "translation.de")
    assert texts(open_sources(["a.parquet"], pair_keys=keys)) == FOUR
    table.save_to_disk("saved")
    for place in ("a.parquet", "saved"):
        (source,) = open_sources([place], label_key="label")
        assert labels(source) == [("a", "pos"), ("b", "neg"), ("d", "pos")]
    with pytest.raises(DataError, match="has no 'nowhere'; name the label with --label-key"):
        texts(open_sources(["a.parquet"], label_key="nowhere"))


@pytest.mark.parametrize(
    ("name", "exists", "calls"),
    [
        ("wikitext", ("wikitext", None), [("wikitext", None)]),
        ("owner/set", ("owner/set", None), [("owner/set", None)]),
        ("set/config", ("set", "config"), [("set/config", None), ("set", "config")]),
        ("owner/set/config", ("owner/set", "config"), [("owner/set", "config")]),
    ],
)
def test_names_and_configurations(
    monkeypatch: pytest.MonkeyPatch, name: str, exists: Any, calls: list[Any]
) -> None:
    """Do not use the network: a fake package knows one data set and records the calls."""
    datasets = extra("datasets")
    asked: list[Any] = []

    def load(path: str, config: str | None, **options: Any) -> Any:
        asked.append((path, config))
        assert options == {"split": "train", "streaming": True, "trust_remote_code": False}
        if (path, config) != exists:
            raise FileNotFoundError(f"no {path}\nand a long explanation")
        return datasets.Dataset.from_dict({"text": ["x"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert texts(open_sources([f"hf:{name}"])) == ["x"]
    assert asked == calls


def test_names_that_cannot_be_found() -> None:
    extra("datasets")
    with pytest.raises(UserError, match=r"hf:no-such-owner/no-such-set: .*no-such-owner") as error:
        open_sources(["hf:no-such-owner/no-such-set"])
    assert "\n" not in str(error.value)


def test_a_stream_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = extra("datasets")

    def rows() -> Any:
        yield from ({"text": "x"} for _ in range(64))
        raise ConnectionError("the line went dead")

    broken = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: broken)
    with pytest.raises(DataError, match=r"hf:x: reading failed after 64 rows \(the line went dead"):
        texts(open_sources(["hf:x"]))


# --------------------------------------------------------------------------- built in


def test_python_stdlib() -> None:
    source = python_stdlib()
    assert "PSF" in str(source.license)
    names = [path.as_posix() for path in source.files]
    assert len(names) > 300
    for name in ("/argparse.py", "/json/decoder.py"):
        assert any(one.endswith(name) for one in names)
    parts = {part for path in source.files for part in path.parts[-3:]}
    assert not parts & {"site-packages", "test", "tests", "idle_test"}
    assert [one.files for one in open_sources(["python-stdlib"])] == [source.files]


def test_python_without_its_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match="python-stdlib: this Python comes without"):
        python_stdlib()


# --------------------------------------------------------------------------- parts of long texts

TOKENIZER = Tokenizer.train(sentences(200), 300)
chunks = st.lists(st.text(max_size=30), max_size=20)
# Words shorter than any limit below, so that a seam is always within reach.
WORDS = ["fox", "don't", "42", "::", "ü", " ", "  ", "\n", "\r\n", "\t", "\xa0", "\x1c"]


@given(chunks=chunks, limit=st.integers(1, 40))
def test_parts_are_the_text_in_order(chunks: list[str], limit: int) -> None:
    out = list(pieces(chunks, limit))
    assert "".join(chunk.text for chunk in out) == "".join(chunks)
    assert [chunk.ends for chunk in out] == [False] * (len(out) - 1) + [True]
    assert all(len(chunk.text) <= limit for chunk in out)
    assert len(out) == 1 or all(chunk.text for chunk in out)


@given(words=st.lists(st.sampled_from(WORDS), max_size=80), limit=st.integers(20, 60))
def test_tokens_are_those_of_the_whole(words: list[str], limit: int) -> None:
    text = "".join(words)
    out = [chunk.text for chunk in pieces(words, limit)]
    seams = all(not left[-1].isspace() and right[0] in " \n\r\t" for left, right in pairwise(out))
    ids = [id_ for chunk in out for id_ in TOKENIZER.encode(chunk)]
    assert TOKENIZER.decode(ids) == text
    if seams:
        assert ids == TOKENIZER.encode(text)


def test_prose_is_cut_at_a_seam_and_other_text_anywhere() -> None:
    text = "".join(sentences(200))
    out = [chunk.text for chunk in pieces([text], 100)]
    assert len(out) > 80
    assert all(re.match(r"[ \n]", chunk) for chunk in out[1:])
    assert [id_ for chunk in out for id_ in TOKENIZER.encode(chunk)] == TOKENIZER.encode(text)
    assert [chunk.text for chunk in pieces(["abcdefgh"], 3)] == ["abc", "def", "gh"]
