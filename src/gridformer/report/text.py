"""Prints the summary of runs on the terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gridformer.report.history import marks_of
from gridformer.report.reading import RunReading
from gridformer.report.settings import table as settings_table
from gridformer.report.summary import summary

_MOST_MARKS = 5


def print_summary(runs: Sequence[RunReading], console: Console) -> None:
    """Prints a few numbers of each run, what went wrong, and the settings that differ.

    Args:
        runs: The runs.
        console: Where to print.
    """
    _print(console, runs, [(row.name, row.values) for row in summary(runs)])
    for run in runs:
        if run.problem:
            said = _visible(f"{run.label}: its settings cannot be read: {run.problem}")
            console.print(said, soft_wrap=True)
        troubles = [mark for mark in marks_of(run) if mark.kind == "trouble"]
        for mark in troubles[-_MOST_MARKS:]:
            console.print(_visible(f"{run.label}, step {mark.step}: {mark.text}"), soft_wrap=True)
    if len(runs) > 1:
        rows = settings_table(runs, differing=True)
        console.print(Text("settings that differ" if rows else "no settings differ", style="bold"))
        _print(console, runs, rows)


def _print(
    console: Console, runs: Sequence[RunReading], rows: Sequence[tuple[str, list[str]]]
) -> None:
    if not rows:
        return
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("", style="bold")
    for run in runs:
        table.add_column(_visible(run.label), overflow="fold")
    for name, values in rows:
        table.add_row(_visible(name), *map(_visible, values))
    console.print(table)


def _visible(text: str) -> Text:
    """Returns a text with control characters as escapes, so that it cannot steer a terminal."""
    return Text(
        "".join(
            letter.encode("unicode_escape").decode()
            if unicodedata.category(letter) in ("Cc", "Cf", "Cs")
            else letter
            for letter in text
        )
    )
