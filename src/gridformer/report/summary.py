"""A few numbers of each run: the head of a page, and all that a terminal shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gridformer.models import describe_parameters
from gridformer.parallel.registry import describe_layout
from gridformer.report.figures import words
from gridformer.report.reading import RunReading, marks_of, settings_table
from gridformer.train.metrics import token_perplexity
from gridformer.utils.errors import visible
from gridformer.utils.units import counted, format_count, three_digits

NOTHING = "-"
_MOST_MARKS = 5  # of a run on a terminal
_LONGEST_NAME = 100  # of a layout
_RECENT = 20  # steps over which the last training loss is a mean


def summary(runs: Sequence[RunReading]) -> list[tuple[str, list[str]]]:
    """Returns the rows of the summary: a name, and the value of each run.

    Rows that no run has a value for are left out.
    """
    rows: dict[str, Callable[[RunReading], str]] = {
        "model": _model,
        "layout": _layouts,
        "processes": lambda run: str(run.config.layout.n_processes) if run.config else "",
        "steps": _steps,
        "state": lambda run: run.state,
        "starts": _starts,
        "training loss": _recent,
        **{_name(key): partial(_last, key=key) for key in _evaluated(runs)},
        "lowest validation loss": _lowest,
        "tokens": _of("tokens", _count),
        "tokens/s, median": _of("tokens_per_s", lambda values: three_digits(median(values))),
        "MFU, median": _of("mfu", lambda values: f"{median(values):.1%}"),
        "peak of memory": _of("peak_memory_gib", lambda values: f"{max(values):.3g} GiB"),
        "fullest expert": _of("experts_fullest", _load),
        "experts without tokens": _of("experts_idle", lambda values: f"{_mean(values):.1%}"),
        "rollbacks": _of("rollbacks", _count),
        "steps skipped for overflow": _of("skipped", _count),
        "steps left out": lambda run: str(sum("left_out" in line for line in run.metrics) or ""),
    }
    table = [(name, [value(run) or NOTHING for run in runs]) for name, value in rows.items()]
    return [(name, values) for name, values in table if any(v != NOTHING for v in values)]


def _of(key: str, shown: Callable[[list[float]], str]) -> Callable[[RunReading], str]:
    """Returns what shows the values of a metric of a run, if it has some."""
    return lambda run: shown(values) if (values := run.series(key)[1]) else ""


def _count(values: list[float]) -> str:
    return format_count(values[-1]) if values[-1] else ""


def _mean(values: list[float]) -> float:
    return fmean(values[-_RECENT:])


def _load(values: list[float]) -> str:
    recent = counted(len(values[-_RECENT:]), "step")
    return f"{_mean(values):.3g} times the mean load (last {recent})"


def _model(run: RunReading) -> str:
    if run.config is None:
        return ""
    model = run.config.model
    name = model.family if model.name == "custom" else model.name
    return f"{name} ({describe_parameters(model)})"


def _layouts(run: RunReading) -> str:
    """Returns the layouts of all starts of a run, in their order."""
    last = [describe_layout(run.config.layout)] if run.config else []
    told = [event.get("layout") for event in run.events if event["event"] == "start"]
    names = [name[:_LONGEST_NAME] for name in told if isinstance(name, str)] + last
    return ", then ".join(name for name, before in zip(names, ["", *names]) if name != before)


def _starts(run: RunReading) -> str:
    n = sum(event["event"] == "start" for event in run.events)
    return str(n) if n > 1 else ""


def _steps(run: RunReading) -> str:
    of = f" of {run.config.train.steps:,}" if run.config else ""
    return f"{run.last_step:,}{of}" if run.metrics else ""


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
        return ""
    text = f"{values[-1]:.4g}"
    if key != "val_loss" or run.config is None:
        return text
    _, tokens = run.series("val_loss_tokens")
    last = {key: values[-1]} | ({"val_loss_tokens": tokens[-1]} if tokens else {})
    perplexity = token_perplexity(run.config, last)
    return text if perplexity is None else f"{text} (perplexity {perplexity:,.4g})"


def _lowest(run: RunReading) -> str:
    steps, values = run.series("val_loss")
    if not values:
        return ""
    lowest = min(range(len(values)), key=values.__getitem__)
    return f"{values[lowest]:.4g} at step {steps[lowest]:,}"


def _recent(run: RunReading) -> str:
    recent = run.series("loss")[1][-_RECENT:]
    last = f"mean of the last {counted(len(recent), 'step')}"
    return f"{fmean(recent):.4g} ({last})" if recent else ""


def print_summary(runs: Sequence[RunReading], console: Console) -> None:
    """Prints a few numbers of each run, what went wrong, and the settings that differ."""
    _print(console, runs, summary(runs))
    for run in runs:
        if run.problem:
            said = _text(f"{run.label}: its settings cannot be read: {run.problem}")
            console.print(said, soft_wrap=True)
        troubles = [mark for mark in marks_of(run) if mark.kind == "trouble"]
        for mark in troubles[-_MOST_MARKS:]:
            console.print(_text(f"{run.label}, step {mark.step}: {mark.text}"), soft_wrap=True)
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
        table.add_column(_text(run.label), overflow="fold")
    for name, values in rows:
        table.add_row(_text(name), *map(_text, values))
    console.print(table)


def _text(text: str) -> Text:
    """Returns a text as it is, without markup of rich."""
    return Text(visible(text))
