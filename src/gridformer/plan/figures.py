"""The figures of a report about layouts: where time goes, memory, timeline, outlook.

plotly is an extra, see `gridformer.utils.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gridformer.cluster.file import Cluster
from gridformer.plan.advice import seconds_of
from gridformer.plan.predict import predict
from gridformer.plan.search import Found
from gridformer.plan.timeline import summarized

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


@dataclass(frozen=True)
class Outlook:
    """The fastest layout by estimate for another batch or number of devices."""

    at: int
    found: Found | None


def _named(layouts: Sequence[Found]) -> list[str]:
    """Returns a label for each layout; those with equal names differ by their number."""
    return [f"{number}. {found.name}" for number, found in enumerate(layouts, start=1)]


def _figure(height: int, **layout: Any) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 10, "r": 40, "t": 40, "b": 50},
        font={"size": 13},
        **layout,
    )
    return figure


def where(layouts: Sequence[Found]) -> go.Figure:
    """Returns stacked bars of the seconds of a step by kind."""
    names = _named(layouts)
    figure = _figure(130 + 34 * len(layouts), barmode="stack", legend=_ABOVE)
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
    figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix="  ")
    figure.update_xaxes(title="seconds a step")
    return figure


def memory_bars(layouts: Sequence[Found]) -> go.Figure:
    """Returns bars of the fullest device's memory, with the limit as a line."""
    figure = _figure(120 + 34 * len(layouts), showlegend=False)
    peaks = [found.prediction.peak_gib or 0.0 for found in layouts if found.prediction]
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
    red = "#de2d26"
    figure.add_vline(x=limit, line={"color": red, "width": 2, "dash": "dash"})
    # The label stands above the plot, where no bar is.
    figure.add_annotation(
        x=limit,
        y=1,
        yref="paper",
        yanchor="bottom",
        xanchor="right",
        showarrow=False,
        text=f"limit {limit:.1f} GiB",
        font={"color": red},
    )
    figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix="  ")
    figure.update_xaxes(title="GiB", range=[0, max(limit, *peaks) * 1.05])
    return figure


def outlook_line(
    points: Sequence[Outlook], axis: str, unit: str, value: Callable[[Found], float]
) -> go.Figure:
    """Returns a line of a value over a number, with the layouts beside its points.

    Args:
        points: The number and the layout of each point; points without a layout are named as what
            does not fit.
        axis: The name of the number.
        unit: The unit of the value.
        value: Returns the value of a layout.
    """
    figure = _figure(380, showlegend=False)
    figure.update_layout(margin={"r": 150})  # for the name of the last layout
    some = [(point.at, point.found) for point in points if point.found is not None]
    figure.add_scatter(
        x=[at for at, _ in some],
        y=[value(found) for _, found in some],
        mode="lines+markers+text",
        text=[found.name.replace(", ", "<br>") for _, found in some],
        textposition="bottom right",  # the line goes up as a rule
        cliponaxis=False,
        marker={"size": 9, "color": "#08519c"},
        hovertemplate="%{x}: %{y:.4g} " + unit + "<br>%{text}<extra></extra>",
    )
    nothing = [point.at for point in points if point.found is None]
    if nothing:
        text = f"nothing fits at {axis} {', '.join(map(str, nothing))}"
        figure.add_annotation(x=0, y=1.05, xref="paper", yref="paper", text=text, showarrow=False)
    figure.update_xaxes(title=axis, type="log", tickvals=[at for at, _ in some])
    figure.update_yaxes(title={"text": unit, "standoff": 12}, rangemode="tozero", automargin=True)
    return figure


def timeline(found: Found, cluster: Cluster) -> go.Figure:
    """Returns what the replayed ranks of the best layout do when."""
    prediction = predict(found.run, cluster, memory=False, timeline=True)
    segments = summarized(prediction.timeline)
    rows = list(dict.fromkeys(segment.row for segment in segments))
    figure = _figure(130 + 30 * len(rows), barmode="overlay", legend=_ABOVE)
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
    figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix="  ", categoryarray=rows)
    figure.update_xaxes(title="seconds")
    return figure
