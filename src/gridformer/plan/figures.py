"""The figures of a report about layouts: where time goes, memory, timeline, outlook.

plotly is an extra, see `gridformer.utils.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gridformer.cluster.file import Cluster
from gridformer.plan.advice import seconds_of
from gridformer.plan.predict import predict
from gridformer.plan.search import Found
from gridformer.plan.timeline import summarized
from gridformer.utils.page import ABOVE, figure, stacked_bars

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
SMALL = 0.002  # kinds that take less than this fraction of every step are not drawn


@dataclass(frozen=True)
class Outlook:
    """The fastest layout by estimate for another batch or number of devices."""

    at: int
    found: Found | None


def _named(layouts: Sequence[Found]) -> list[str]:
    """Returns a label for each layout; those with equal names differ by their number."""
    return [f"{number}. {found.name}" for number, found in enumerate(layouts, start=1)]


def where(layouts: Sequence[Found]) -> go.Figure:
    """Returns stacked bars of the seconds of a step by kind."""
    rows = [(one.name, seconds_of(one.prediction)) for one in layouts if one.prediction]
    least = SMALL * max(sum(parts.values()) for _, parts in rows)
    kinds = [*COLORS, *sorted({kind for _, parts in rows for kind in parts} - {*COLORS})]
    large = (kind for kind in kinds if max(parts.get(kind, 0.0) for _, parts in rows) > least)
    colors = {kind: COLORS.get(kind, "#bdbdbd") for kind in large}
    return stacked_bars(rows, colors, "seconds a step", lambda value: f"{value:.4g} s")


def memory_bars(layouts: Sequence[Found]) -> go.Figure:
    """Returns bars of the fullest device's memory, with the limit as a line."""
    made = figure(120 + 34 * len(layouts), showlegend=False)
    peaks = [found.prediction.peak_gib or 0.0 for found in layouts if found.prediction]
    made.add_bar(
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
    made.add_vline(x=limit, line={"color": red, "width": 2, "dash": "dash"})
    # The label stands above the plot, where no bar is.
    made.add_annotation(
        x=limit,
        y=1,
        yref="paper",
        yanchor="bottom",
        xanchor="right",
        showarrow=False,
        text=f"limit {limit:.1f} GiB",
        font={"color": red},
    )
    made.update_yaxes(autorange="reversed", automargin=True, ticksuffix="  ")
    made.update_xaxes(title="GiB", range=[0, max(limit, *peaks) * 1.05])
    return made


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
    made = figure(380, showlegend=False)
    made.update_layout(margin={"r": 150})  # for the name of the last layout
    some = [(point.at, point.found) for point in points if point.found is not None]
    made.add_scatter(
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
        made.add_annotation(x=0, y=1.05, xref="paper", yref="paper", text=text, showarrow=False)
    made.update_xaxes(title=axis, type="log", tickvals=[at for at, _ in some])
    made.update_yaxes(title={"text": unit, "standoff": 12}, rangemode="tozero", automargin=True)
    return made


def timeline(found: Found, cluster: Cluster) -> go.Figure:
    """Returns what the replayed ranks of the best layout do when."""
    prediction = predict(found.run, cluster, memory=False, timeline=True)
    segments = summarized(prediction.timeline)
    rows = list(dict.fromkeys(segment.row for segment in segments))
    made = figure(130 + 30 * len(rows), barmode="overlay", legend=ABOVE)
    kinds = list(dict.fromkeys(segment.kind for segment in segments))
    for kind in sorted(kinds, key=lambda kind: (kind.startswith("messages"), kind)):
        mine = [segment for segment in segments if segment.kind == kind]
        name = {"memory_bound": "memory-bound", "exposed": "waits for messages"}.get(kind, kind)
        color = COLORS.get({"exposed": "messages over row"}.get(kind, name))
        made.add_bar(
            y=[segment.row for segment in mine],
            x=[segment.end - segment.start for segment in mine],
            base=[segment.start for segment in mine],
            name=name,
            orientation="h",
            marker={"color": color or COLORS.get(name.replace("messages ", "messages over "))},
            hovertemplate="%{base:.4g} s<extra>" + name + "</extra>",
        )
    made.update_yaxes(autorange="reversed", automargin=True, ticksuffix="  ", categoryarray=rows)
    made.update_xaxes(title="seconds")
    return made
