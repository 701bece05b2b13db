"""Writes what was read from run directories as a page: one file that loads nothing from elsewhere.

Runs are not trusted: every text that comes from one is escaped.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gridformer import __version__
from gridformer.memory.show import MEMORY_COLORS
from gridformer.report import figures
from gridformer.report.estimates import Estimates
from gridformer.report.reading import RunReading, Sample, marks_of, settings_table
from gridformer.report.steptrace import PurposeTraffic, StepTimeline, read_timeline
from gridformer.report.summary import summary
from gridformer.utils.files import write_text
from gridformer.utils.page import document, figure_place, stacked_bars
from gridformer.utils.units import byte_unit, counted, format_bytes, three_digits

if TYPE_CHECKING:
    import plotly.graph_objects as go

_STYLE = """
.runs td, .runs th { text-align: left; vertical-align: top; }
.runs tr > :first-child { color: var(--soft); white-space: nowrap; }
.runs td, .many td { overflow-wrap: break-word; }
.many { min-width: 560px; } .many td, .many th { text-align: left; }
.many td.n, .many th.n { text-align: right; white-space: nowrap; }
.bad { color: #c0392b; }
pre { background: var(--code); padding: 8px 10px; white-space: pre-wrap; overflow-wrap: anywhere;
  font-size: 13px; margin: 4px 0 12px; max-height: 340px; overflow-y: auto; }
pre b { font-weight: 600; color: #4a90d9; }
details { margin: 10px 0; } summary { cursor: pointer; }
footer { margin: 40px 0 20px; color: var(--soft); font-size: 13px; }
"""


def write_report_page(
    runs: Sequence[RunReading], estimates: Sequence[Estimates], path: Path
) -> None:
    """Writes the report of one or several runs with their estimates to a file."""
    traced = [
        next((line for path in reversed(run.traces) if (line := read_timeline(path))), None)
        for run in runs
    ]
    title = f"{runs[0].label}: report" if len(runs) == 1 else f"Comparison of {len(runs)} runs"
    drawn: dict[str, go.Figure] = {}
    sections = [
        f"<h1>{_text(title)}</h1>",
        _summary(runs),
        _differing(runs),
        _curves(runs, drawn),
        _experts(runs, drawn),
        _history(runs),
        _timelines(runs, traced, drawn),
        _communication(runs, traced, estimates, drawn),
        _memory(runs, estimates, drawn),
        _samples(runs),
        _settings(runs),
        f"<footer>Written by gridformer {_text(__version__)} from run directories.</footer>",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = document(title, "\n".join(filter(None, sections)), drawn, _STYLE)
    # A name of a file may have bytes that are not UTF-8.
    write_text(path, text, "backslashreplace")


def _text(value: object) -> str:
    return html.escape(str(value))


def _place(drawn: dict[str, go.Figure], name: str, figure: go.Figure) -> str:
    drawn[name] = figure
    return figure_place(name)


# --------------------------------------------------------------------------- tables


def _rows(
    head: Sequence[str], rows: Iterable[Sequence[object]], kind: str, numbers: Sequence[int] = ()
) -> str:
    """Returns a table of texts, whose columns `numbers` are aligned at the right."""

    def cells(name: str, values: Sequence[object]) -> str:
        return "".join(
            f"<{name}{' class=n' if i in numbers else ''}>{_text(value)}</{name}>"
            for i, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><tr>{cells("th", head)}</tr>{body}</table>'
        "</div>"
    )


def _labels(runs: Sequence[RunReading]) -> list[str]:
    return ["", *(run.label for run in runs)]


def _summary(runs: Sequence[RunReading]) -> str:
    rows = [[name, *values] for name, values in summary(runs)]
    problems = "".join(
        f'<p class="note bad">{_text(run.label)}: its settings cannot be read: '
        f"{_text(run.problem)}</p>"
        for run in runs
        if run.problem
    )
    return _rows(_labels(runs), rows, "runs") + problems


def _differing(runs: Sequence[RunReading]) -> str:
    rows = [[key, *values] for key, values in settings_table(runs, differing=True)]
    table = _rows(_labels(runs), rows, "runs") if rows else '<p class="note">None.</p>'
    return f"<h2>Settings that differ</h2>{table}" if len(runs) > 1 else ""


def _settings(runs: Sequence[RunReading]) -> str:
    rows = [[key, *values] for key, values in settings_table(runs, differing=False)]
    if not rows:
        return ""
    changed = {key for run in runs for key in run.changed}
    first, others = ([row for row in rows if (row[0] in changed) is is_] for is_ in (True, False))
    return (
        "<h2>Settings</h2>"
        '<p class="note">Those that are not the defaults.</p>'
        f"{_rows(_labels(runs), first, 'runs')}"
        f"<details><summary>{counted(len(others), 'setting')} as by default</summary>"
        f"{_rows(_labels(runs), others, 'runs')}</details>"
    )


def _curves(runs: Sequence[RunReading], drawn: dict[str, go.Figure]) -> str:
    if not any(run.names for run in runs):
        return ""
    dashed = (
        "Where a run has several curves in one chart, they are dashed. " if len(runs) > 1 else ""
    )
    return (
        "<h2>Training</h2>"
        '<p class="note">Drag over a chart to enlarge a part of all charts, and double-click for '
        f"the whole run. Pale lines are not smoothed. {dashed}Triangles mark where a run was "
        "resumed, crosses steps that were not finite and saves that failed. Of long runs each "
        "curve shows the smallest and the largest value of every small part.</p>"
        f"{_place(drawn, 'curves', figures.curves(runs))}"
    )


def _experts(runs: Sequence[RunReading], drawn: dict[str, go.Figure]) -> str:
    sections = []
    for number, run in enumerate(runs):
        if (loads := figures.expert_loads(run)) is not None:
            name = f"<h3>{_text(run.label)}</h3>" if len(runs) > 1 else ""
            sections.append(name + _place(drawn, f"experts-{number}", loads))
    if not sections:
        return ""
    return (
        "<h2>Experts</h2>"
        '<p class="note">How many tokens the fullest expert of each layer got, relative to the '
        "mean of its experts: 1 is an even share.</p>" + "".join(sections)
    )


def _history(runs: Sequence[RunReading]) -> str:
    several = len(runs) > 1
    rows: list[list[object]] = [
        [*([run.label] if several else []), mark.step, mark.text, mark.time]
        for run in runs
        for mark in marks_of(run)
    ]
    if not rows:
        return ""
    timed = any(row[-1] for row in rows)
    head = [*([""] if several else []), "step", "what", *(["time (UTC)"] if timed else [])]
    rows = [row[: len(head)] for row in rows]
    table = _rows(head, rows, "many", numbers=(int(several), int(several) + 2))
    opened = " open" if len(rows) <= 12 else ""
    return (
        f"<h2>What has happened</h2><details{opened}>"
        f"<summary>{counted(len(rows), 'event')}</summary>{table}</details>"
    )


# --------------------------------------------------------------------------- one step


def _timelines(
    runs: Sequence[RunReading],
    timelines: Sequence[StepTimeline | None],
    drawn: dict[str, go.Figure],
) -> str:
    sections = []
    for number, (run, line) in enumerate(zip(runs, timelines)):
        if line is None:
            continue
        shown = (
            f", the first {len(line.names)} of {line.n_ranks} processes"
            if line.n_ranks > len(line.names)
            else ""
        )
        rows = [(name, _in_order(seconds)) for name, seconds in zip(line.names, line.seconds)]
        sections.append(
            f"<h3>{_text(f'{run.label}: step {line.step}{run.where(line.step)}{shown}')}</h3>"
            + _place(drawn, f"timeline-{number}", figures.timeline(line))
            + _place(
                drawn,
                f"seconds-{number}",
                stacked_bars(rows, figures.time_colors(rows), "seconds", _milliseconds),
            )
        )
    if not sections:
        return (
            "<h2>Timeline of a step</h2>"
            '<p class="note">None was recorded. <code>train.trace_step=N</code> records step N, '
            "also of a run that goes on.</p>"
        )
    return (
        "<h2>Timeline of a step</h2>"
        '<p class="note">As it was measured (<code>train.trace_step</code>). The thin line below a '
        "process shows messages under way; where the process waits for one, it is orange. The bars "
        "add up what each process spent its time on.</p>" + "".join(sections)
    )


def _milliseconds(seconds: float) -> str:
    return f"{three_digits(1000 * seconds)} ms"


def _in_order(seconds: Mapping[str, float]) -> dict[str, float]:
    first = ("forward", "backward", "weight", "update")
    kinds = [*(kind for kind in first if kind in seconds), *sorted({*seconds} - {*first})]
    return {kind: seconds[kind] for kind in kinds}


def _communication(
    runs: Sequence[RunReading],
    timelines: Sequence[StepTimeline | None],
    estimates: Sequence[Estimates],
    drawn: dict[str, go.Figure],
) -> str:
    """Shows the messages of a step: those that were measured, or else those of the run's code."""
    shown: list[tuple[str, list[PurposeTraffic]]] = []
    for run, line, estimated in zip(runs, timelines, estimates):
        if line is not None and line.traffic:
            shown.append((f"{run.label}, measured{run.where(line.step)}", line.traffic))
        elif estimated.traffic:
            shown.append((f"{run.label}, rank {estimated.rank} by its code", estimated.traffic))
    # What a rank is the root of does not cross its link.
    shown = [(name, [one for one in traffic if one.bytes]) for name, traffic in shown]
    if not shown:
        return ""
    rows = []
    for name, traffic in shown:
        by_axis: defaultdict[str, float] = defaultdict(float)
        for one in traffic:
            by_axis[one.axis] += one.bytes
        rows.append((name, dict(sorted(by_axis.items(), key=lambda item: -item[1]))))
    colors = figures.axis_colors([axis for _, parts in rows for axis in parts])
    tables = "".join(
        f"<details><summary>{_text(name)}: "
        f"{three_digits(sum(one.messages for one in traffic))} messages, "
        f"{format_bytes(sum(one.bytes for one in traffic))}</summary>{_traffic(traffic)}</details>"
        for name, traffic in shown
    )
    return (
        "<h2>Where communication goes</h2>"
        '<p class="note">Bytes that a process sends or receives in a step, by axis of the layout: '
        "those that have to cross its link with any algorithm, which the root of a broadcast or a "
        "reduce has none of.</p>"
        + _place(drawn, "communication", _byte_bars(rows, colors))
        + tables
    )


def _traffic(traffic: Sequence[PurposeTraffic]) -> str:
    rows = [
        [one.label, one.op, one.axis, three_digits(one.messages), format_bytes(one.bytes)]
        for one in traffic
    ]
    head = ("purpose", "collective", "axis", "messages", "bytes")
    return _rows(head, rows, "many", numbers=(3, 4))


def _byte_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]], colors: Mapping[str, str]
) -> go.Figure:
    """Returns bars of numbers of bytes, in the unit of the largest."""
    unit, name = byte_unit(max((sum(parts.values()) for _, parts in rows), default=0.0))
    scaled = [(row, {kind: value / unit for kind, value in parts.items()}) for row, parts in rows]
    return stacked_bars(scaled, colors, name, lambda value: format_bytes(value * unit))


def _memory(
    runs: Sequence[RunReading],
    estimates: Sequence[Estimates],
    drawn: dict[str, go.Figure],
) -> str:
    rows, notes = [], []
    for run, one in zip(runs, estimates):
        if one.problem or one.memory:
            notes.append(f"{run.label}: {one.problem or f'the peak is in {one.moment}.'}")
        if one.memory:
            which = f"rank {one.rank}" + (f", {one.stands_for}" if one.stands_for else "")
            rows.append((f"{run.label} ({which})", one.memory))
    if not notes:
        return ""
    bars = _byte_bars(rows, MEMORY_COLORS)
    return (
        "<h2>Memory</h2>"
        '<p class="note">What the tensors of the fullest process hold at the peak of a step, as '
        "<code>gridformer memory</code> estimates it from the run's code. "
        + " ".join(_text(note) for note in notes)
        + "</p>"
        + (_place(drawn, "memory", bars) if rows else "")
    )


# --------------------------------------------------------------------------- samples


def _samples(runs: Sequence[RunReading]) -> str:
    sections = []
    for run in runs:
        if not run.samples:
            continue
        name = f"<h3>{_text(run.label)}</h3>" if len(runs) > 1 else ""
        *earlier, last = [_sample(one) for one in run.samples]
        more = (
            f"<details><summary>{len(earlier)} earlier samples</summary>"
            f"{''.join(reversed(earlier))}</details>"
            if earlier
            else ""
        )
        sections.append(name + last + more)
    return f"<h2>Generated text</h2>{''.join(sections)}" if sections else ""


def _sample(one: Sample) -> str:
    step = f'<p class="note">After step {one.step}</p>' if one.step is not None else ""
    reference = (
        f'<p class="note">Reference</p><pre>{_text(one.reference)}</pre>' if one.reference else ""
    )
    return f"{step}<pre><b>{_text(one.prompt)}</b>{_text(one.text)}</pre>{reference}"
