"""The files that the docs list for reading one step, and those that also run in it."""

import re
from typing import NamedTuple

from tests.support.fenced import ROOT

SOURCE = ROOT / "src/gridformer"
_FILE = re.compile(r"`([\w/]+\.py)`")


class ReadingOrder(NamedTuple):
    """Paths of files relative to src/gridformer.

    Attributes:
        numbered: The files of each entry of the numbered list, of which a step runs one or several.
        helpers: The files of the table in docs/reference/internals.md.
    """

    numbered: dict[int, list[str]]
    helpers: set[str]


def reading_order() -> ReadingOrder:
    """Read the sections of docs/architecture.md and docs/reference/internals.md on one step."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = text[text.index("## Reading one step") : text.index("## Where to add")]
    ordered, _, _ = section.partition("\n\nBefore a step")
    entries = re.split(r"^(\d+)\. ", ordered, flags=re.M)
    numbered = {int(n): _files(entry) for n, entry in zip(entries[1::2], entries[2::2])}
    text = (ROOT / "docs/reference/internals.md").read_text(encoding="utf-8")
    section = text[text.index("## Files that also run") : text.index("## Seams")]
    rows = re.findall(r"^\| `([\w/]+)` \| ([^|]+) \|", section, re.MULTILINE)
    helpers = {f"{folder}/{name}" for folder, names in rows for name in _FILE.findall(names)}
    return ReadingOrder(numbered, helpers)


def _files(text: str) -> list[str]:
    """Return the files of a text; a name without a folder is in that of the file before it."""
    folder, files = "", []
    for name in _FILE.findall(text):
        folder, _, file = name.rpartition("/") if "/" in name else (folder, "/", name)
        files.append(f"{folder}/{file}")
    return files
