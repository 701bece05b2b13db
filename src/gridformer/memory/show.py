"""Shows memory breakdowns as a table, and as an HTML page that plots them over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gridformer.config import RunConfig
from gridformer.memory.estimate import MemoryBreakdown
from gridformer.memory.room import on_gpu
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.products import replica_work
from gridformer.parallel.pipeline.schedules import PASSES
from gridformer.parallel.registry import describe_layout
from gridformer.record.routing import routing_notes
from gridformer.record.step import KINDS, MESSAGES
from gridformer.utils.files import write_text
from gridformer.utils.units import byte_unit

_COLUMNS = 5  # ranks side by side in a table
# States are blue, activations orange, and the rest green and gray.
MEMORY_COLORS = {
    "parameters": "#08306b",
    "gradients": "#2171b5",
    "optimizer": "#6baed6",
    "activations: attention": "#7f2704",
    "activations: feed-forward": "#d94801",
    "activations: norms": "#fd8d3c",
    "activations: residuals": "#fdae6b",
    "activations: embedding, loss": "#fdd0a2",
    "recomputed": "#74c476",
    "workspace": "#bdbdbd",
}


def print_breakdowns(
    run: RunConfig,
    breakdowns: Sequence[MemoryBreakdown],
    stand_for: Mapping[int, str],
    console: Console,
) -> None:
    """Prints what each rank holds at its peak, one column per rank, named by `largest_ranks`."""
    console.print(Text(_title(run)))
    for note in routing_notes(run):
        console.print(Text(f"({note})"))
    unit, name = byte_unit(max(breakdown.peak for breakdown in breakdowns))
    for start in range(0, len(breakdowns), _COLUMNS):
        some = breakdowns[start : start + _COLUMNS]
        table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
        table.add_column(f"{name} at the peak")
        for breakdown in some:
            table.add_column(_heading(breakdown, stand_for), justify="right")
        for name_of_row, values in _rows(some, unit).items():
            table.add_row(name_of_row, *values, style="bold" if name_of_row == "peak" else None)
        console.print(table)
    copied = decide(run.model, run.layout, replica_work(run)).copied_parameters
    if copied:
        value = 8 if run.train.dtype == "float64" else 4
        said = f"{_size(round(copied * value / run.layout.pp), unit)} {name}"
        console.print(
            f"About {said} of a device's parameters are heads of keys and values that other "
            "columns or branches hold, too, because the heads do not divide over them."
        )


def _rows(breakdowns: Sequence[MemoryBreakdown], unit: int) -> dict[str, list[str]]:
    """Returns the rows of a table: the values of each rank by name. Rows of zeros are left out."""
    sizes = {kind: [one.by_kind.get(kind, 0) for one in breakdowns] for kind in KINDS}
    rows = {kind: [_size(n, unit) for n in some] for kind, some in sizes.items() if any(some)}
    rows["peak"] = [_size(one.peak, unit) for one in breakdowns]
    rows["when"] = [one.moment for one in breakdowns]
    rows["between steps"] = [_size(one.between, unit) for one in breakdowns]
    if any(one.host for one in breakdowns):
        rows["in host memory"] = [_size(one.host, unit) for one in breakdowns]
    if any(one.saved for one in breakdowns):
        rows["copies in host memory while it saves"] = [
            _size(one.saved, unit) for one in breakdowns
        ]
    return rows


def write_memory_page(
    run: RunConfig, breakdowns: Sequence[MemoryBreakdown], stand_for: Mapping[int, str], path: Path
) -> None:
    """Writes a self-contained HTML page that plots each rank's memory by kind over a step."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    from gridformer.utils.page import document, figure, figure_place

    unit, name = byte_unit(max(breakdown.peak for breakdown in breakdowns))
    titles = [
        f"{_heading(one, stand_for).replace(chr(10), ', ')}: {one.peak / unit:.4g} {name} "
        f"({one.moment})"
        for one in breakdowns
    ]
    made = make_subplots(rows=len(breakdowns), cols=1, subplot_titles=titles)
    for row, breakdown in enumerate(breakdowns, start=1):
        line = breakdown.timeline
        for kind in KINDS:
            if kind in line.bytes_of:
                made.add_trace(
                    go.Scatter(
                        x=line.times,
                        y=[n / unit for n in line.bytes_of[kind]],
                        name=kind,
                        legendgroup=kind,
                        showlegend=row == 1,
                        stackgroup="all",
                        line={"width": 0, "color": MEMORY_COLORS[kind], "shape": "hv"},
                        fillcolor=MEMORY_COLORS[kind],
                        hovertemplate="%{y:.4g} " + name,
                    ),
                    row=row,
                    col=1,
                )
        for when, phase in _main_phases(line.phases, line.times[-1]):
            made.add_vline(
                x=when,
                line={"width": 1, "dash": "dot", "color": "#555"},
                annotation={"text": phase, "textangle": -90, "font": {"size": 10}},
                annotation_position="top left",
                row=row,
                col=1,
            )
        made.update_yaxes(title=name, rangemode="tozero", row=row, col=1)
    made.update_xaxes(title="allocations and frees, in order", row=len(breakdowns), col=1)
    legend = {"traceorder": "reversed"}
    figure(120 + 420 * len(breakdowns), made, hovermode="x unified", legend=legend)
    heads = [_heading(one, stand_for).replace("\n", ", ") for one in breakdowns]
    lines = [("th", ["", *heads])]
    lines += [("td", [kind, *values]) for kind, values in _rows(breakdowns, unit).items()]
    cells = ("".join(f"<{tag}>{escape(one)}</{tag}>" for one in line) for tag, line in lines)
    about = [
        "What the tensors of a rank hold over one step, and below it at the peak.",
        *routing_notes(run),
        f"Sizes are in {name}. Estimated from the run's code on tensors without memory.",
    ]
    body = (
        f"<h1>{escape(_title(run))}</h1><p class='note'>{escape(' '.join(about))}</p>"
        f"{figure_place('memory')}<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, document(_title(run), body, {"memory": made}))


def _main_phases(phases: Sequence[tuple[int, str]], end: int) -> list[tuple[int, str]]:
    """Returns the phases to label in a plot, each with the time at which it begins.

    Phases that are too short for a label are left out, and so are the passes of many micro-batches,
    whose labels would hide the plot.
    """
    kept = [one for one in phases if one[1] not in (*MESSAGES, "read the batch")]
    if len(kept) > 12:
        kept = [one for one in kept if one[1] not in PASSES]
    begins = [when for when, _ in kept[1:]] + [end]
    return [one for one, after in zip(kept, begins) if after - one[0] > 0.02 * end]


def _title(run: RunConfig) -> str:
    train = run.train
    saving = [
        f"{name}={value}"
        for name, value, plain in (
            ("recompute", train.recompute, "none"),
            ("recompute_layers", train.recompute_layers, 0),
            ("update", train.update, "after_backward"),
            ("offload", train.offload, "none"),
        )
        if value != plain
    ]
    micro = train.global_batch // (run.layout.dp * run.layout.micro_batches)
    devices = "GPUs" if on_gpu(run) else "CPUs"
    parts = [f"{micro} samples per micro-batch", train.dtype, *saving]
    return f"{run.model.name} on {describe_layout(run.layout)}: {', '.join(parts)}, for {devices}"


def _heading(breakdown: MemoryBreakdown, stand_for: Mapping[int, str]) -> str:
    said = stand_for.get(breakdown.rank, "")
    return f"rank {breakdown.rank}" + (f"\n{said}" if said else "")


def _size(n_bytes: int, unit: int) -> str:
    return f"{n_bytes / unit:,.3f}" if n_bytes else "-"
