"""Every kind of SOURCE, and the messages where there is none."""

import gzip
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gridformer.data.prepare import reading, records
from gridformer.data.prepare.reading import Cursor
from gridformer.data.prepare.sources import open_sources, python_stdlib
from gridformer.utils.errors import DataError, UserError
from tests.support.data import texts
from tests.support.marks import extra


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with wanted and unwanted files."""
    root = tmp_path / "tree"
    for name, text in {
        "b.txt": "bee",
        "a.md": "ay",
        "sub/c.py": "see",
        "sub/d.xyz": "dee",
        ".git/e.txt": "hidden",
        ".f.txt": "hidden",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_folders_are_walked_in_order_by_suffix(tree: Path) -> None:
    assert texts(open_sources([str(tree)])) == ["ay", "bee", "see"]
    assert texts(open_sources([str(tree)], suffixes=[".txt", "xyz"])) == ["bee", "dee"]


def test_patterns(tree: Path) -> None:
    assert texts(open_sources([str(tree / "**" / "*.[px]y*")])) == ["see", "dee"]


def test_folder_without_a_fitting_file(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file that ends in \.rs; there are \.txt, .*--suffix"):
        open_sources([str(tree)], suffixes=["rs"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="there are no files"):
        open_sources([str(tmp_path / "empty")])


def test_missing_sources() -> None:
    with pytest.raises(UserError, match=r"wikitext: no such .* hf:wikitext"):
        open_sources(["wikitext"])
    with pytest.raises(UserError, match="at least one source"):
        open_sources([])


@pytest.mark.parametrize(
    ("typed", "meant"), [("python-stdib", "python-stdlib"), ("notess", "notes"), ("nots/", "notes")]
)
def test_missing_sources_may_be_misspelled(
    typed: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes").mkdir()
    with pytest.raises(UserError) as error:
        open_sources([typed])
    assert str(error.value) == f"{typed}: no such file or folder: did you mean '{meant}'?"


def test_samples_are_the_same_documents_in_another_order(tmp_path: Path) -> None:
    names = [f"{i:02}" for i in range(30)]
    for name in names:
        (tmp_path / f"{name}.txt").write_text(name)
    (source,) = open_sources([str(tmp_path)])
    sample = [item.text for item in source.sampled()]
    assert sorted(sample) == names
    assert sample != names


# --------------------------------------------------------------------------- text files


def test_bytes_become_text(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9 \xff\r\n")
    assert texts(open_sources([str(path)])) == ["café \ufffd\r\n"]


def test_binary_files_are_skipped_and_counted(tmp_path: Path) -> None:
    chunk = reading._CHUNK
    (tmp_path / "a.txt").write_bytes(b"ok")
    (tmp_path / "b.txt").write_bytes(b"\0")
    # The first chunk looks like text, but nothing of the file may be read.
    (tmp_path / "c.txt").write_bytes(b"x" * chunk + b"\0")
    skipped: Counter[str] = Counter()
    (source,) = open_sources([str(tmp_path)])
    assert texts([source], skipped) == ["ok"]
    assert skipped == {reading.BINARY: 2}


@pytest.mark.parametrize("first", [1, reading._CHUNK])
def test_documents_that_are_not_utf8_are_kept_and_counted(tmp_path: Path, first: int) -> None:
    latin = "a" * (first - 1) + "äx"
    (tmp_path / "a.txt").write_text("good \ufffd", encoding="utf-8")  # is text
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf" + latin.encode("latin-1"))
    (tmp_path / "c.txt").write_bytes(b"cut off \xc3")
    skipped: Counter[str] = Counter()
    (source,) = open_sources([str(tmp_path)])
    read = "".join(chunk.text + "|" * chunk.ends for chunk in source.read(skipped, Cursor()))
    assert read == "good \ufffd|" + "a" * (first - 1) + "\ufffdx|cut off \ufffd|"
    place = tmp_path / "b.txt"
    assert skipped == {f"documents with bytes that are not UTF-8 text (first: {place})": 2}


def test_json_lines_that_are_not_utf8_are_kept_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xe4"}\n{"text": "\xf6"}\n')
    skipped: Counter[str] = Counter()
    (source,) = open_sources([str(path)])
    assert texts([source], skipped) == ["a", "\ufffd", "\ufffd"]
    assert skipped == {f"lines with bytes that are not UTF-8 text (first: {path}, line 2)": 2}


def test_long_files_come_in_chunks_and_characters_stay_whole(tmp_path: Path) -> None:
    text = "é" * (reading._CHUNK + 1)  # two bytes each: a chunk ends inside a character
    path = tmp_path / "t.txt"
    path.write_text("a" + text, encoding="utf-8")
    (source,) = open_sources([str(path)])
    out = list(source.read(Counter(), Cursor()))
    assert len(out) > 10
    assert "".join(chunk.text for chunk in out) == "a" + text
    assert source.n_bytes == path.stat().st_size


def test_compressed_text(tmp_path: Path) -> None:
    path = tmp_path / "t.txt.gz"
    path.write_bytes(gzip.compress(b"squeezed"))
    (source,) = open_sources([str(tmp_path)])
    assert texts([source]) == ["squeezed"]
    assert source.n_bytes is None
    path.write_bytes(gzip.compress(b"squeezed" * 1000)[:-9])
    with pytest.raises(DataError, match=r"t\.txt\.gz: cannot be read"):
        texts([source])


def test_files_that_vanish_or_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("x")
    (source,) = open_sources([str(path)])
    path.unlink()
    with pytest.raises(DataError, match=r"t\.txt: cannot be read \(No such file"):
        texts([source])


# --------------------------------------------------------------------------- JSON lines

RECORDS: list[dict[str, Any]] = [
    {"text": "one\nline", "body": "1"},
    {"text": "", "body": "2"},
    {"text": None, "body": "3"},
    {"text": "two", "body": "4"},
]


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    raw = ("\n\n".join(map(json.dumps, RECORDS)) + "\n").encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    skipped: Counter[str] = Counter()
    (source,) = open_sources([str(tmp_path)])
    assert texts([source], skipped) == ["one\nline", "two"]
    assert skipped == {records.NO_TEXT: 2}
    assert texts(open_sources([str(tmp_path / name)], text_key="body")) == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', "line 2: is not JSON"),
        ("[1, 2]", "line 2: is list, not an object"),
        ('{"body": "x", "id": 1}', "line 2: has no 'text'; .*--text-key, there are body, id"),
        ('{"text": 7}', "line 2: 'text' holds int, not text"),
    ],
)
def test_bad_json_lines_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(DataError, match=message):
        texts(open_sources([str(path)]))


@pytest.mark.parametrize("name", ["r.jsonl.gz", "r.en.gz"])
def test_a_line_that_is_too_long_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .gz of 14 MB may hold one line of 3 GB."""
    monkeypatch.setattr(reading, "LONGEST_LINE", 1 << 20)
    path, lines = tmp_path / name, b'{"text": "' + b"x" * (1 << 20) + b'"}\n'
    path.write_bytes(gzip.compress(b'{"text": "fine"}\n' + lines))
    pairs = [str(path), str(path.with_name("r.de.gz"))] if "en" in name else []
    path.with_name("r.de.gz").write_bytes(gzip.compress(b"fine\nfine\n"))
    with pytest.raises(DataError, match=r"line 2: has more than 1,048,576 bytes: write one"):
        texts(open_sources(pairs or [str(path)], pair_files=bool(pairs)))


# --------------------------------------------------------------------------- Hugging Face


def _table() -> Any:
    datasets = extra("datasets")
    return datasets.Dataset.from_dict(
        {
            "text": [record["text"] for record in RECORDS] * 50,
            "body": [record["body"] for record in RECORDS] * 50,
        }
    )


def test_saved_data_sets(tmp_path: Path) -> None:
    datasets = extra("datasets")
    _table().save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=_table(), test=_table().select([3])).save_to_disk(tmp_path / "two")
    assert texts(open_sources([str(tmp_path / "one")])) == ["one\nline", "two"] * 50
    assert texts(open_sources([str(tmp_path / "two")], split="test")) == ["two"]
    assert texts(open_sources([str(tmp_path / "two")], split="test", text_key="body")) == ["4"]
    with pytest.raises(UserError, match="no split 'dev'; use --split train or test"):
        open_sources([str(tmp_path / "two")], split="dev")
    with pytest.raises(DataError, match=r"has no 'content'; .* there are body, text"):
        texts(open_sources([str(tmp_path / "one")], text_key="content"))


@pytest.mark.parametrize(
    ("said", "kept"), [("", None), (None, None), ("mit", "mit"), (["mit", "bsd"], "mit, bsd")]
)
def test_licenses(monkeypatch: pytest.MonkeyPatch, said: Any, kept: str | None) -> None:
    datasets = extra("datasets")
    table = _table()
    table.info.license = said
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    assert open_sources(["hf:x"])[0].license == kept


def test_tables(tmp_path: Path) -> None:
    _table().to_parquet(str(tmp_path / "t.parquet"))
    _table().save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    for path in (tmp_path / "t.parquet", arrow):
        skipped: Counter[str] = Counter()
        (source,) = open_sources([str(path)])
        assert texts([source], skipped) == ["one\nline", "two"] * 50
        assert skipped == {records.NO_TEXT: 100}
    (tmp_path / "t.parquet").write_bytes(b"not a table")
    with pytest.raises(DataError, match=r"t\.parquet: "):
        texts(open_sources([str(tmp_path / "t.parquet")]))


def test_streamed_by_name(tmp_path: Path) -> None:
    _table().to_parquet(str(tmp_path / "train.parquet"))
    (source,) = open_sources([f"hf:{tmp_path}"])
    assert source.name == f"hf:{tmp_path}"
    assert texts([source]) == ["one\nline", "two"] * 50
    assert [item.text for item in source.sampled()] == ["one\nline", "two"] * 50
    with pytest.raises(UserError, match="dev"):
        open_sources([f"hf:{tmp_path}"], split="dev")


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
    assert source.license is not None
    assert "PSF" in source.license
    names = [path.as_posix() for path in source.files]
    assert len(names) > 300
    assert any(name.endswith("/argparse.py") for name in names)
    assert any(name.endswith("/json/decoder.py") for name in names)
    parts = {part for path in source.files for part in path.parts[-3:]}
    assert not parts & {"site-packages", "test", "tests", "idle_test"}
    assert [one.files for one in open_sources(["python-stdlib"])] == [source.files]


def test_python_without_its_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match="python-stdlib: this Python comes without"):
        python_stdlib()


def test_links_that_lead_nowhere_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    os.symlink(tmp_path / "gone", tmp_path / "b.txt")
    (source,) = open_sources([str(tmp_path)])
    assert [path.name for path in source.files] == ["a.txt"]
