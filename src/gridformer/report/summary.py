"""A few numbers of each run: the head of a page, and all that a terminal shows."""

from __future__ import annotations

import statistics
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gridformer.models import count_parameters
from gridformer.parallel.registry import describe_layout
from gridformer.report.figures import words
from gridformer.report.reading import RunReading, marks_of, settings_table, starts
from gridformer.train.metrics import token_perplexity
from gridformer.utils.units import format_count, three_digits

NOTHING = "-"
_MOST_MARKS = 5  # of a run on a terminal
_RECENT = 20  # steps over which the last training loss is a mean


class SummaryRow(NamedTuple):
    """A number of all runs.

    Attributes:
        name: What it is.
        values: Its value in each run, as text.
    """

    name: str
    values: list[str]


def summary(runs: Sequence[RunReading]) -> list[SummaryRow]:
    """Returns the rows of the summary. Those that no run has a value for are left out."""
    rows = [
        SummaryRow("model", [_model(run) for run in runs]),
        SummaryRow(
            "layout",
            [describe_layout(run.config.layout) if run.config else NOTHING for run in runs],
        ),
        SummaryRow("processes", [_processes(run) for run in runs]),
        SummaryRow("steps", [_steps(run) for run in runs]),
        SummaryRow("state", [run.state or NOTHING for run in runs]),
        SummaryRow("starts", [str(n) if (n := starts(run)) > 1 else NOTHING for run in runs]),
        SummaryRow("training loss", [_recent(run, "loss") for run in runs]),
        *(SummaryRow(_name(key), [_last(run, key) for run in runs]) for key in _evaluated(runs)),
        SummaryRow("lowest validation loss", [_lowest(run) for run in runs]),
        SummaryRow("tokens", [_count(run, "tokens") for run in runs]),
        SummaryRow("tokens/s, median", [_median(run, "tokens_per_s") for run in runs]),
        SummaryRow("MFU, median", [_percent(run, "mfu") for run in runs]),
        SummaryRow("peak of memory", [_most(run, "peak_memory_gib", " GiB") for run in runs]),
        SummaryRow("rollbacks", [_count(run, "rollbacks") for run in runs]),
        SummaryRow("steps skipped for overflow", [_count(run, "skipped") for run in runs]),
        SummaryRow("steps left out", [_left_out(run) for run in runs]),
    ]
    return [row for row in rows if any(value != NOTHING for value in row.values)]


def _model(run: RunReading) -> str:
    if run.config is None:
        return NOTHING
    model = run.config.model
    name = model.family if model.name == "custom" else model.name
    return f"{name} ({format_count(count_parameters(model))} parameters)"


def _processes(run: RunReading) -> str:
    return str(run.config.layout.n_processes) if run.config else NOTHING


def _steps(run: RunReading) -> str:
    of = f" of {run.config.train.steps:,}" if run.config else ""
    return f"{run.last_step:,}{of}" if run.metrics else NOTHING


def _evaluated(runs: Sequence[RunReading]) -> list[str]:
    """Returns the names of all metrics of evaluations, `val_loss` first."""
    keys = dict.fromkeys(
        key for run in runs for key in run.names if key.startswith(("val_", "test_"))
    )
    return sorted(keys, key=lambda key: key != "val_loss")


def _name(key: str) -> str:
    title = words(key)
    return title[:1].lower() + title[1:]


def _last(run: RunReading, key: str) -> str:
    _, values = run.series(key)
    if not values:
        return NOTHING
    text = f"{values[-1]:.4g}"
    if key != "val_loss" or run.config is None:
        return text
    _, words = run.series("val_loss_tokens")
    last = {key: values[-1]} | ({"val_loss_tokens": words[-1]} if words else {})
    found = token_perplexity(run.config, last)
    return text if found is None else f"{text} (perplexity {found:,.4g})"


def _lowest(run: RunReading) -> str:
    steps, values = run.series("val_loss")
    if not values:
        return NOTHING
    lowest = min(range(len(values)), key=values.__getitem__)
    return f"{values[lowest]:.4g} at step {steps[lowest]:,}"


def _recent(run: RunReading, key: str) -> str:
    _, values = run.series(key)
    if not values:
        return NOTHING
    n = min(_RECENT, len(values))
    return f"{statistics.fmean(values[-n:]):.4g} (mean of the last {n} steps)"


def _median(run: RunReading, key: str) -> str:
    _, values = run.series(key)
    return three_digits(statistics.median(values)) if values else NOTHING


def _percent(run: RunReading, key: str) -> str:
    _, values = run.series(key)
    return f"{statistics.median(values):.1%}" if values else NOTHING


def _most(run: RunReading, key: str, unit: str) -> str:
    _, values = run.series(key)
    return f"{max(values):.3g}{unit}" if values else NOTHING


def _count(run: RunReading, key: str) -> str:
    _, values = run.series(key)
    return format_count(values[-1]) if values and values[-1] else NOTHING


def _left_out(run: RunReading) -> str:
    n = sum("left_out" in line for line in run.metrics)
    return str(n) if n else NOTHING


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
