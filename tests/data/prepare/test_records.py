"""Pairs and labels from records and folders."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gridformer.data.prepare.reading import Cursor, TextSource
from gridformer.data.prepare.sources import open_sources
from gridformer.utils.errors import DataError, UserError
from tests.support.data import texts
from tests.support.marks import extra

PAIRS: list[dict[str, Any]] = [
    {"en": " one ", "de": "eins"},
    {"en": "two", "de": ""},
    {"en": None, "de": "drei"},
    {"en": "four", "de": "vier"},
]
LABELED: list[dict[str, Any]] = [
    {"text": "good", "stars": 5},
    {"text": "bad", "stars": 1},
    {"text": "who knows", "stars": None},
    {"text": "", "stars": 3},
]


def lines(path: Path, records: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def labels(source: TextSource) -> list[tuple[str, str | None]]:
    return [(item.text, item.label) for item in source.read(Counter(), Cursor())]


def test_pairs(tmp_path: Path) -> None:
    sources = open_sources([lines(tmp_path / "a.jsonl", PAIRS)], pair_keys=("en", "de"))
    assert texts(sources) == ["one", "eins", "four", "vier"]
    assert (sources[0].kind, sources[0].languages) == ("pairs", ("en", "de"))
    skipped: Counter[str] = Counter()
    texts(sources, skipped)
    assert skipped == {"pairs without one of the texts": 2}


def test_keys_inside_of_keys(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"translation": pair} for pair in PAIRS])
    sources = open_sources([path], pair_keys=("translation.en", "translation.de"))
    assert texts(sources) == ["one", "eins", "four", "vier"]
    assert sources[0].languages == ("en", "de")
    with pytest.raises(DataError, match=r"has no 'translation.fr'; name the two .* --pair-keys"):
        texts(open_sources([path], pair_keys=("translation.en", "translation.fr")))


def test_labels(tmp_path: Path) -> None:
    (source,) = open_sources([lines(tmp_path / "a.jsonl", LABELED)], label_key="stars")
    assert source.kind == "labeled"
    assert labels(source) == [("good", "5"), ("bad", "1")]
    skipped: Counter[str] = Counter()
    texts([source], skipped)
    assert skipped == {"records without a label": 1, "records without text": 1}


def test_wrong_keys_name_their_option(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", LABELED)
    with pytest.raises(DataError, match=r"has no 'star'; name the label with --label-key.* stars"):
        texts(open_sources([path], label_key="star"))
    with pytest.raises(DataError, match=r"'stars' holds int, not text.*--pair-keys"):
        texts(open_sources([path], pair_keys=("text", "stars")))
    path = lines(tmp_path / "b.jsonl", [{"text": "a", "score": 0.5}])
    with pytest.raises(DataError, match=r"'score' holds float; a label is .*--label-key"):
        texts(open_sources([path], label_key="score"))


def test_tables(tmp_path: Path) -> None:
    datasets = extra("datasets")
    path = str(tmp_path / "a.parquet")
    table = datasets.Dataset.from_dict(
        {"translation": PAIRS, "text": ["a", "b", "c", "d"], "label": [1, 0, -1, 1]},
        features=datasets.Features(
            {
                "translation": {"en": datasets.Value("string"), "de": datasets.Value("string")},
                "text": datasets.Value("string"),
                "label": datasets.ClassLabel(names=["neg", "pos"]),
            }
        ),
    )
    table.to_parquet(path)
    keys = ("translation.en", "translation.de")
    assert texts(open_sources([path], pair_keys=keys)) == ["one", "eins", "four", "vier"]
    table.save_to_disk(str(tmp_path / "saved"))
    for place in (path, str(tmp_path / "saved")):
        (source,) = open_sources([place], label_key="label")
        assert labels(source) == [("a", "pos"), ("b", "neg"), ("d", "pos")]
    with pytest.raises(DataError, match="has no 'nowhere'; name the label with --label-key"):
        texts(open_sources([path], label_key="nowhere"))


def test_labels_from_folders(tmp_path: Path) -> None:
    root = tmp_path / "reviews"
    for name in ("neg/a.txt", "neg/deep/b.txt", "pos/c.txt", "readme.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (source,) = open_sources([str(root)], labels_from_folders=True)
    assert labels(source) == [("neg/a.txt", "neg"), ("neg/deep/b.txt", "neg"), ("pos/c.txt", "pos")]
    assert source.kind == "labeled"
    with pytest.raises(DataError, match="no folders whose names are labels"):
        open_sources([str(root / "pos")], labels_from_folders=True)
    with pytest.raises(UserError, match="--labels-from-folders has no effect there"):
        open_sources([str(root / "readme.txt")], labels_from_folders=True)


def test_plain_text_has_neither(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    path = str(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"labels are read from .*--labels-from-folders"):
        texts(open_sources([path], label_key="label"))
    with pytest.raises(DataError, match=r"pairs are read from the records of \.jsonl"):
        texts(open_sources([path], pair_keys=("en", "de")))
    # Only records are read from folders.
    lines(tmp_path / "b.jsonl", PAIRS)
    assert len(texts(open_sources([str(tmp_path)], pair_keys=("en", "de")))) == 4


def test_options_and_sources_that_exclude_each_other(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", PAIRS)
    with pytest.raises(UserError, match="--pair-keys and --label-key exclude each other"):
        open_sources([path], pair_keys=("en", "de"), label_key="x")
    with pytest.raises(UserError, match="python-stdlib: --label-key has no effect there"):
        open_sources(["python-stdlib"], label_key="x")
    po = tmp_path / "nl.po"
    po.write_text('msgid "one two three four"\nmsgstr "een twee drie vier"\n')
    with pytest.raises(UserError, match=r"holds pairs, .*a\.jsonl holds text: prepare them into"):
        open_sources([f"gettext:nl:{po}", path])
    with pytest.raises(UserError, match=r"translates en to nl, .*a\.jsonl en to de: prepare them"):
        open_sources([f"gettext:nl:{po}", path], pair_keys=("en", "de"))
    po.rename(tmp_path / "de.po")
    both = open_sources([f"gettext:de:{tmp_path}", path], pair_keys=("en", "de"))
    assert len(texts(both)) == 6
