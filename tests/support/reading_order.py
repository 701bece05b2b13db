"""The files that docs/architecture.md lists for reading one step, and those that also run in it."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.support.fenced import ROOT

SOURCE = ROOT / "src/gridformer"
_FILE = re.compile(r"`([\w/]+\.py)`")


class ReadingOrder(NamedTuple):
    """Paths of files relative to src/gridformer.

    Attributes:
        numbered: The files of each entry of the numbered list, of which a step runs one or several.
        helpers: The files of the table below it.
    """

    numbered: dict[int, list[str]]
    helpers: set[str]


def reading_order() -> ReadingOrder:
    """Read the section of docs/architecture.md on reading one step."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = text[text.index("## Reading one step") : text.index("## Seams")]
    entries = re.split(r"^(\d+)\. ", section.partition("\n\nThese are not all")[0], flags=re.M)
    numbered: dict[int, list[str]] = {}
    folder = ""
    for number, entry in zip(entries[1::2], entries[2::2]):
        numbered[int(number)] = []
        for name in _FILE.findall(entry):
            # a name without a folder is in the folder of the file named before it
            folder, _, file = name.rpartition("/") if "/" in name else (folder, "/", name)
            numbered[int(number)].append(f"{folder}/{file}")
    rows = re.findall(r"^\| `([\w/]+)` \| ([^|]+) \|", section, re.MULTILINE)
    helpers = {f"{folder}/{name}" for folder, names in rows for name in _FILE.findall(names)}
    return ReadingOrder(numbered, helpers)
