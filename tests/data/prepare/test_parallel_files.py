"""Two files whose lines translate one another become pairs."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pytest

from gridformer.data.prepare.sources import open_sources
from gridformer.utils.errors import DataError, UserError
from tests.support.data import texts


def written(folder: Path, name: str, lines: list[str]) -> str:
    path = folder / name
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return str(path)


def test_lines_are_pairs(tmp_path: Path) -> None:
    # U+2028 ends a line for str.splitlines, and must not move all lines after it.
    one = written(tmp_path, "train.en", ["\ufeffa cat", "two \u2028 lines", "", "no German", "end"])
    other = written(tmp_path, "train.de.gz", ["eine Katze", "zwei Zeilen", "leer", "", "Ende"])
    (source,) = open_sources([one, other], pair_files=True)
    assert (source.kind, source.languages) == ("pairs", ("en", "de"))
    assert source.n_bytes is None
    skipped: Counter[str] = Counter()
    texts([source], skipped)
    assert sum(skipped.values()) == 2
    want = ["a cat", "eine Katze", "two \u2028 lines", "zwei Zeilen", "end", "Ende"]
    assert texts([source]) == want
    assert sorted(text for item in source.sampled() for text in item.texts if text) == sorted(
        [*want, "leer", "no German"]
    )


def test_what_cannot_be_pairs_is_refused(tmp_path: Path) -> None:
    one = written(tmp_path, "a.en", ["x", "y"])
    other = written(tmp_path, "a.de", ["x", "y", "z"])
    (source,) = open_sources([one, other], pair_files=True)
    with pytest.raises(DataError, match=r"a\.en: ends after 2 lines, but .*a\.de has more"):
        texts([source])
    for specs, said in (
        ([one], "there are 1 sources: write, for instance, train.en train.de"),
        ([one, one], "does not translate itself"),
        ([one, str(tmp_path)], "no such file, and --pair-files reads"),
    ):
        with pytest.raises(UserError, match=said):
            open_sources(specs, pair_files=True)
    with pytest.raises(UserError, match="--pair-keys and --pair-files exclude each other"):
        open_sources([one, other], pair_files=True, pair_keys=("en", "de"))
