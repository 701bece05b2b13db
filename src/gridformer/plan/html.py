"""Writes what a search has found as a page: ranking, where time goes, memory, timeline, outlook.

The page is one file that needs no network. plotly is an extra, see `gridformer.utils.extras`.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.plan.advice import Advice, seconds_of
from gridformer.plan.predict import predict
from gridformer.plan.ranking import settings_of
from gridformer.plan.search import Found, Result, Search
from gridformer.plan.timeline import summarized
from gridformer.utils.page import document

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Kernels are blue, waiting for messages orange, and other waiting gray.
COLORS = {
    "products": "#08519c",
    "attention": "#3182bd",
    "memory-bound": "#9ecae1",
    "update": "#74c476",
    "messages over col": "#a63603",
    "messages over row": "#e6550d",
    "messages over branch": "#fd8d3c",
    "messages over dp": "#fdae6b",
    "messages over pp": "#fdd0a2",
    "launches": "#756bb1",
    "bubble": "#969696",
    "other": "#d9d9d9",
}
_ABOVE = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
SMALL = 0.002  # kinds that take less than this fraction of every step are not drawn
FACTORS = (0.25, 0.5, 1, 2, 4)  # of the batch and of the number of devices
_STYLE = "td:nth-child(2), th:nth-child(2) { text-align: left; }"


@dataclass(frozen=True)
class Outlook:
    """The fastest layout by estimate for another batch or number of devices."""

    at: int
    found: Found | None


def write_page(
    run: RunConfig, cluster: Cluster, result: Result, advice: Sequence[Advice], path: Path
) -> None:
    """Writes the report.

    Args:
        run: The run that was asked for.
        cluster: The machine.
        result: What was found; it has at least one layout.
        advice: The advice for each layout.
        path: The file, whose folder is created if needed.
    """
    n, batch = result.layouts[0].run.layout.n_processes, run.train.global_batch
    costs = Search(run, cluster, n).costs  # all of them remember the same messages

    @cache
    def best_of(b: int, k: int) -> Found | None:
        return fastest(Search(_with_batch(run, b), cluster, k, costs))

    batches = outlook(FACTORS, batch, lambda b: best_of(b, n))
    devices = [k for k in (round(n * f) for f in FACTORS) if k <= cluster.size]
    counts = outlook([k / n for k in devices], n, lambda k: best_of(batch, k))
    best = result.layouts[0]
    assert best.prediction is not None, "only traced layouts are listed"
    title = f"{run.model.name} on {n} devices of {cluster.name}"
    figures = [
        _where(result.layouts),
        _memory(result.layouts),
        _timeline(best, cluster),
        _lines(batches, "global batch", "sequences a second", _per_second),
        _lines(counts, "devices", "sequences a second", _per_second),
    ]
    plots = [
        figure.to_html(full_html=False, include_plotlyjs=i == 0, config={"displayModeBar": False})
        for i, figure in enumerate(figures)
    ]
    sections = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="note">{batch} sequences of {run.seq_len} tokens a step, {run.train.dtype}. '
        f"{result.n_arrangements} arrangements were estimated, and the fastest were traced: the "
        "code of a step ran on tensors without memory, and the cluster file says what its kernels "
        "and messages take. Nothing here was measured.</p>",
        "<h2>Ranking</h2>",
        _ranking(result.layouts),
        "<h2>Where each second goes</h2>",
        '<p class="note">The slowest rank of each layout, one optimizer step.</p>',
        plots[0],
        "<h2>Memory</h2>",
        '<p class="note">The fullest device of each layout, and what a device has for tensors.</p>',
        plots[1],
        "<h2>Timeline of the best</h2>",
        '<p class="note">The ranks that differ; all others do what one of these does. Each moment '
        "has the color of what takes most of it.</p>",
        plots[2],
        "<h2>Why</h2>",
        _reasons(result.layouts, advice),
        "<h2>Other batches</h2>",
        '<p class="note">The fastest layout for each batch, by estimate.</p>',
        plots[3],
        "<h2>Other numbers of devices</h2>",
        '<p class="note">The fastest layout for each number, by estimate, with the same batch.</p>',
        plots[4],
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = document(title, "\n".join(sections), _STYLE)
    path.write_text(text, encoding="utf-8")


def outlook(
    factors: Sequence[float], base: int, best: Callable[[int], Found | None]
) -> list[Outlook]:
    """Returns the fastest layouts by estimate for multiples of a number.

    Args:
        factors: The multiples.
        base: The number.
        best: Returns the fastest for a number.
    """
    numbers = dict.fromkeys(round(base * factor) for factor in factors)
    return [Outlook(at, best(at)) for at in numbers if at >= 1]


def fastest(search: Search) -> Found | None:
    """Returns the fastest layout of a search that fits by estimate."""
    ranked, _ = search.ranked(improved=8)
    return next((one for one in ranked if one.estimate.fits), None)


def _with_batch(run: RunConfig, batch: int) -> RunConfig:
    return run.model_copy(update={"train": run.train.model_copy(update={"global_batch": batch})})


def _per_second(found: Found) -> float:
    return found.run.train.global_batch / found.estimate.step_s


# --------------------------------------------------------------------------- text


def _ranking(layouts: Sequence[Found]) -> str:
    rows = []
    for number, found in enumerate(layouts, start=1):
        prediction = found.prediction
        assert prediction is not None, "only traced layouts are listed"
        cells = [
            str(number),
            html.escape(found.name),
            f"{prediction.step_s:.4g}",
            f"{found.run.train.global_batch / prediction.step_s:,.4g}",
            f"{prediction.model_tflops_per_device:.4g}",
            f"{prediction.peak_gib:.1f}",
            str(found.run.layout.micro_batches),
            found.run.train.recompute,
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = ("", "layout", "s a step", "sequences/s", "TFLOP/s a device", "GiB", "micro-batches")
    head = "".join(f"<th>{text}</th>" for text in (*heads, "recompute"))
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _reasons(layouts: Sequence[Found], advice: Sequence[Advice]) -> str:
    items = []
    for found, why in zip(layouts, advice):
        text = " ".join(html.escape(sentence) for sentence in why.sentences)
        items.append(
            f"<li><b>{html.escape(found.name)}</b><br>{text}<br>"
            f"<code>{html.escape(settings_of(found.run))}</code></li>"
        )
    return f"<ol>{''.join(items)}</ol>"


# --------------------------------------------------------------------------- figures


def _named(layouts: Sequence[Found]) -> list[str]:
    """Returns a label for each layout; those with equal names differ by their number."""
    return [f"{number}. {found.name}" for number, found in enumerate(layouts, start=1)]


def _figure(height: int, **layout: Any) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 10, "r": 110, "t": 70, "b": 50},
        font={"size": 13},
        **layout,
    )
    return figure


def _where(layouts: Sequence[Found]) -> go.Figure:
    """Returns stacked bars of the seconds of a step by kind."""
    names = _named(layouts)
    figure = _figure(120 + 34 * len(layouts), barmode="stack", legend=_ABOVE)
    seconds = [seconds_of(found.prediction) for found in layouts if found.prediction]
    kinds = [*COLORS, *sorted({kind for one in seconds for kind in one} - {*COLORS})]
    for kind in kinds:
        values = [one.get(kind, 0.0) for one in seconds]
        if max(values) > SMALL * max(sum(one.values()) for one in seconds):
            figure.add_bar(
                y=names,
                x=values,
                name=kind,
                orientation="h",
                marker={"color": COLORS.get(kind, "#bdbdbd")},
                hovertemplate="%{x:.4g} s " + kind + "<extra></extra>",
            )
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_xaxes(title="seconds a step")
    return figure


def _memory(layouts: Sequence[Found]) -> go.Figure:
    """Returns bars of the fullest device's memory, with the limit as a line."""
    figure = _figure(150 + 34 * len(layouts), showlegend=False)
    peaks = [found.prediction.peak_gib for found in layouts if found.prediction]
    figure.add_bar(
        y=_named(layouts),
        x=peaks,
        orientation="h",
        marker={"color": "#3182bd"},
        text=[f"{peak:.1f} GiB" for peak in peaks],
        textposition="auto",
        hovertemplate="%{x:.1f} GiB<extra></extra>",
    )
    limit = layouts[0].estimate.limit_gib
    figure.add_vline(
        x=limit,
        line={"color": "#de2d26", "width": 2, "dash": "dash"},
        annotation={"text": f"limit {limit:.1f} GiB", "font": {"color": "#de2d26"}},
        annotation_position="top left",
    )
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_xaxes(title="GiB", range=[0, limit * 1.05])
    return figure


def _lines(
    points: Sequence[Outlook], axis: str, unit: str, value: Callable[[Found], float]
) -> go.Figure:
    """Returns a line of a value over a number, with the layouts beside its points."""
    figure = _figure(380, showlegend=False)
    some = [(point.at, point.found) for point in points if point.found is not None]
    figure.add_scatter(
        x=[at for at, _ in some],
        y=[value(found) for _, found in some],
        mode="lines+markers+text",
        text=[found.name for _, found in some],
        textposition="top center",
        cliponaxis=False,
        marker={"size": 9, "color": "#08519c"},
        hovertemplate="%{x}: %{y:.4g} " + unit + "<br>%{text}<extra></extra>",
    )
    nothing = [point.at for point in points if point.found is None]
    if nothing:
        text = f"nothing fits at {axis} {', '.join(map(str, nothing))}"
        figure.add_annotation(x=0, y=1.05, xref="paper", yref="paper", text=text, showarrow=False)
    figure.update_xaxes(title=axis, type="log", tickvals=[at for at, _ in some])
    figure.update_yaxes(title=unit, rangemode="tozero")
    return figure


def _timeline(found: Found, cluster: Cluster) -> go.Figure:
    """Returns what the replayed ranks of the best layout do when."""
    prediction = predict(found.run, cluster, memory=False, timeline=True)
    segments = summarized(prediction.timeline)
    rows = list(dict.fromkeys(segment.row for segment in segments))
    figure = _figure(170 + 30 * len(rows), barmode="overlay", legend=_ABOVE)
    kinds = list(dict.fromkeys(segment.kind for segment in segments))
    for kind in sorted(kinds, key=lambda kind: (kind.startswith("messages"), kind)):
        mine = [segment for segment in segments if segment.kind == kind]
        name = {"memory_bound": "memory-bound", "exposed": "waits for messages"}.get(kind, kind)
        color = COLORS.get({"exposed": "messages over row"}.get(kind, name))
        figure.add_bar(
            y=[segment.row for segment in mine],
            x=[segment.end - segment.start for segment in mine],
            base=[segment.start for segment in mine],
            name=name,
            orientation="h",
            marker={"color": color or COLORS.get(name.replace("messages ", "messages over "))},
            hovertemplate="%{base:.4g} s<extra>" + name + "</extra>",
        )
    figure.update_yaxes(autorange="reversed", automargin=True, categoryarray=rows)
    figure.update_xaxes(title="seconds")
    return figure
