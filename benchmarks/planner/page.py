"""Puts tables into a page that a person writes, between comments that name them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def marked(name: str) -> tuple[str, str]:
    """Returns the comments between which a page has the table of this name."""
    return f"<!-- made by benchmarks.planner: {name} -->", f"<!-- end of {name} -->"


def fill(path: Path, name: str, lines: Sequence[str]) -> None:
    """Replaces the table of this name in a page.

    Raises:
        ValueError: The page has no place for it.
    """
    begin, end = marked(name)
    text = path.read_text(encoding="utf-8")
    place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not place.search(text):
        raise ValueError(f"{path} has no {begin} ... {end}: write them where the table belongs")
    table = "\n".join([begin, "", *lines, "", end])
    path.write_text(place.sub(lambda _: table, text, count=1), encoding="utf-8")
