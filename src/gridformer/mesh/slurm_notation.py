"""Slurm's short forms of node lists and of numbers of tasks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gridformer.utils.errors import UserError


def expand_nodes(text: str) -> list[str]:
    """Expands `node[01-03,7],other` to `node01`, `node02`, `node03`, `node7` and `other`.

    Raises:
        UserError: The brackets do not match, or a range is malformed.
    """
    parts = re.split(r",(?![^\[]*\])", text)  # at commas outside brackets
    names = [name for part in parts for name in _expand_one(part)]
    if not all(re.fullmatch(r"[^\[\],\s]+", name) for name in names):
        raise UserError(f"Slurm's node list '{text}' cannot be read: set MASTER_ADDR yourself")
    return names


def _expand_one(text: str) -> Iterator[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]+)\](.*)", text)
    if not match:
        yield text
        return
    before, ranges, after = match.groups()
    for part in ranges.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not bounds:
            yield text  # it still has brackets, so the caller raises
            return
        first, last = bounds[1], bounds[2] or bounds[1]
        for number in range(int(first), int(last) + 1):
            for rest in _expand_one(after):
                yield f"{before}{number:0{len(first)}d}{rest}"


def expand_counts(text: str) -> list[int]:
    """Expands `4(x2),3` (tasks per node) to `[4, 4, 3]`; a malformed text gives an empty list."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
