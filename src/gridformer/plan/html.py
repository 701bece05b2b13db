"""Writes what a search has found as a page: ranking, where time goes, memory, timeline, outlook.

The page is one file that needs no network. plotly is an extra (gridformer.utils.errors.require).
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.plan.advice import Advice
from gridformer.plan.predict import predict
from gridformer.plan.prediction import doubts
from gridformer.plan.replay import Interval
from gridformer.plan.search import MemoryKind, PlannedLayout, Result, Search
from gridformer.plan.show import print_result, unlisted
from gridformer.utils.files import write_text
from gridformer.utils.page import ABOVE, document, figure, figure_place, stacked_bars
from gridformer.utils.units import counted

if TYPE_CHECKING:
    import plotly.graph_objects as go

FACTORS = (0.25, 0.5, 1, 2, 4)  # of the batch and of the number of devices
_STYLE = "pre { font-size: 11px; white-space: pre-wrap; } ul { margin-top: 4px; }"
_COLUMNS = 160  # characters in a line of the ranking
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
BINS = 400  # of a step in the timeline; each shows the kind that takes most of its time
MOST_RANKS = 8


def write_plan_page(
    run: RunConfig,
    cluster: Cluster,
    n_devices: int,
    result: Result,
    advice: Sequence[Advice],
    path: Path,
    remedies: Sequence[str] = (),
) -> None:
    """Writes the report on what was found for a run, with the advice for each layout.

    If no layout was found, it says what would fit: the remedies. The file's folder is created if
    needed.
    """
    title = f"{run.model.name} on {counted(n_devices, 'device')} of {cluster.name}"
    note = _note(
        f"{counted(run.train.global_batch, 'sequence')} of {run.seq_len} tokens a step, "
        f"{run.train.dtype}. {result.n_arrangements} arrangements were estimated, and the "
        "fastest were traced: the code of a step ran on tensors without memory, and the "
        "cluster file says what its kernels and messages take. Nothing here was measured."
    )
    figures: dict[str, go.Figure] = {}
    if result.layouts:
        sections, figures = _sections(run, cluster, n_devices, result, advice)
    else:
        sections = {
            "Nothing fits": _list([*remedies, *unlisted(result)]),
            "How certain this is": _list(doubts(cluster, n_devices)),
        }
    body = [f"<h1>{html.escape(title)}</h1>", note]
    body += [f"<h2>{heading}</h2>\n{section}" for heading, section in sections.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, document(title, "\n".join(body), figures, _STYLE))


def _sections(
    run: RunConfig, cluster: Cluster, n: int, result: Result, advice: Sequence[Advice]
) -> tuple[dict[str, str], dict[str, go.Figure]]:
    """Returns the sections of a page with a ranking by heading, and the figures in them by name."""
    batch, best = run.train.global_batch, result.layouts[0]
    costs = Search(run, cluster, n).costs  # all of them remember the same messages
    factors = memory_factors([*result.layouts, *result.refused])

    @cache
    def best_of(b: int, k: int) -> PlannedLayout | None:
        if (b, k) == (batch, n):
            return best
        train = run.train.model_copy(update={"global_batch": b})
        other = run.model_copy(update={"train": train})
        return fastest_that_fits(Search(other, cluster, k, costs), factors)

    batches = [b for b in dict.fromkeys(round(batch * f) for f in FACTORS) if b >= 1]
    counts = [k for k in dict.fromkeys(round(n * f) for f in FACTORS) if 1 <= k <= cluster.size]
    figures = {
        "where": _where(result.listed),
        "memory": _memory_bars(result.listed),
        "timeline": _timeline(predict(best.run, cluster, memory=False, timeline=True).timeline),
        "batches": _outlook({b: best_of(b, n) for b in batches}, "global batch"),
        "devices": _outlook({k: best_of(batch, k) for k in counts}, "devices"),
    }
    by_estimate = "The one in the ranking is predicted from its trace, and all others are estimated"
    shown = StringIO()
    print_result(run, result, advice, cluster, Console(file=shown, width=_COLUMNS), everything=True)
    sections = {
        "Ranking and reasons": f"<pre>{html.escape(shown.getvalue())}</pre>",
        "Where each second goes": _note(
            "The slowest rank of each layout, one optimizer step. Messages are those for which "
            "the device waits; those that travel while it computes are <i>hidden</i>, in the "
            "table and the reasons above."
        )
        + figure_place("where"),
        "Memory": _note("The fullest device of each layout, and what a device has for tensors.")
        + figure_place("memory"),
        "Timeline of the best": _note(
            "The ranks that differ; all others do what one of these does. Each moment has the "
            "color of what takes most of it."
        )
        + figure_place("timeline"),
        "How certain this is": _list(certainty(result, cluster, counts)),
        "Other batches": _note(f"The fastest layout for each batch. {by_estimate}.")
        + figure_place("batches"),
        "Other numbers of devices": _note(
            f"The fastest layout for each number, with the same batch. {by_estimate}."
        )
        + figure_place("devices"),
    }
    return sections, figures


def certainty(result: Result, cluster: Cluster, counts: Sequence[int]) -> list[str]:
    """Returns what makes a report less certain besides the warnings of its layouts.

    `counts` are the numbers of devices of which the report tells, too.
    """
    sentences, said = [], {warning for one in result.listed for warning in one.traced.warnings}
    for n in counts:
        more = [doubt for doubt in doubts(cluster, n) if doubt not in said]
        sentences += [f"On {counted(n, 'device')}: {doubt}." for doubt in more]
        said |= {*more}
    off = [100 * (one.estimate.step_s / one.traced.step_s - 1) for one in result.listed]
    least, most = (f"{v:+.0f}%" if round(v) else "0%" for v in (min(off), max(off)))
    return [*sentences, f"Estimates of the listed layouts are {least} to {most} off their traces."]


def memory_factors(traced: Sequence[PlannedLayout]) -> dict[MemoryKind, float]:
    """Returns how many times their estimated memory layouts of a kind need, at least 1."""
    factors: dict[MemoryKind, float] = {}
    for one in traced:
        factor = one.peak_gib / one.estimate.peak_gib
        factors[one.memory_kind] = max(1.0, factor, factors.get(one.memory_kind, 1.0))
    return factors


def fastest_that_fits(search: Search, factors: Mapping[MemoryKind, float]) -> PlannedLayout | None:
    """Returns the fastest layout of a search whose estimate, times its factor, fits."""
    ranked, _ = search.ranked(improved=8)
    for one in ranked:
        if one.estimate.peak_gib * factors.get(one.memory_kind, 1.0) <= one.estimate.limit_gib:
            return one
    return None


# --------------------------------------------------------------------------- text


def _note(text: str) -> str:
    return f'<p class="note">{text}</p>\n'


def _list(sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


# --------------------------------------------------------------------------- figures


def _where(layouts: Sequence[PlannedLayout]) -> go.Figure:
    """Returns stacked bars of the seconds of a step by kind."""
    rows = [
        (f"{number}. {one.name}", one.traced.seconds_by_kind())
        for number, one in enumerate(layouts, start=1)
    ]
    least = SMALL * max(sum(parts.values()) for _, parts in rows)
    kinds = [*COLORS, *sorted({kind for _, parts in rows for kind in parts} - {*COLORS})]
    large = (kind for kind in kinds if max(parts.get(kind, 0.0) for _, parts in rows) > least)
    colors = {kind: COLORS.get(kind, "#bdbdbd") for kind in large}
    return stacked_bars(rows, colors, "seconds a step", lambda value: f"{value:.4g} s")


def _memory_bars(layouts: Sequence[PlannedLayout]) -> go.Figure:
    """Returns bars of the fullest device's memory, with the limit as a line."""
    made = figure(120 + 34 * len(layouts), showlegend=False)
    peaks, limit, red = [one.peak_gib for one in layouts], layouts[0].estimate.limit_gib, "#de2d26"
    made.add_bar(
        y=[f"{number}. {one.name}" for number, one in enumerate(layouts, start=1)],
        x=peaks,
        orientation="h",
        marker={"color": COLORS["attention"]},
        text=[f"{peak:.1f} GiB" for peak in peaks],
        hovertemplate="%{x:.1f} GiB<extra></extra>",
    )
    made.add_vline(x=limit, line={"color": red, "width": 2, "dash": "dash"})
    # The label stands above the plot, where no bar is.
    above = {"y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "right", "showarrow": False}
    made.add_annotation(x=limit, text=f"limit {limit:.1f} GiB", font={"color": red}, **above)
    made.update_yaxes(autorange="reversed", automargin=True, ticksuffix="  ")
    return made.update_xaxes(title="GiB", range=[0, max(limit, *peaks) * 1.05])


def _outlook(points: Mapping[int, PlannedLayout | None], axis: str) -> go.Figure:
    """Returns a line of sequences a second over a number, with the layouts beside its points."""
    made = figure(380, showlegend=False)
    made.update_layout(margin={"r": 150})  # for the name of the last layout
    some = {at: one for at, one in points.items() if one is not None}
    made.add_scatter(
        x=[*some],
        y=[one.run.train.global_batch / one.step_s for one in some.values()],
        mode="lines+markers+text",
        text=[one.name.replace(", ", "<br>") for one in some.values()],
        textposition="bottom right",  # the line goes up as a rule
        cliponaxis=False,
        marker={"size": 9, "color": COLORS["products"]},
        hovertemplate="%{x}: %{y:.4g} sequences a second<br>%{text}<extra></extra>",
    )
    if nothing := [str(at) for at in points if at not in some]:
        text = f"nothing fits at {axis} {', '.join(nothing)}"
        made.add_annotation(x=0, y=1.05, xref="paper", yref="paper", text=text, showarrow=False)
    made.update_xaxes(title=axis, type="log", tickvals=[*some])
    title = {"text": "sequences a second", "standoff": 12}
    return made.update_yaxes(title=title, rangemode="tozero", automargin=True)


def _timeline(timeline: Mapping[int, Sequence[Interval]]) -> go.Figure:
    """Returns what the replayed ranks of a layout do when, one row for each of their streams.

    A step of many thousand kernels is summarized: each bin shows the kind that takes most of it,
    or nothing where most of it is idle.
    """
    width = max((one.end for some in timeline.values() for one in some), default=0.0) / BINS
    ranks = sorted(timeline)
    shown = ranks if len(ranks) <= MOST_RANKS else [*ranks[: MOST_RANKS - 1], ranks[-1]]
    bins: dict[str, list[dict[str, float]]] = {}  # of each row
    for rank in shown:
        for one in sorted(timeline[rank], key=lambda one: (one.stream != "compute", one.stream)):
            row = f"rank {rank} {one.stream}"
            if row not in bins:
                bins[row] = [defaultdict(float) for _ in range(BINS)]
            kind = one.kind if one.stream == "compute" else one.stream
            for i in range(int(one.start / width), min(BINS, int(one.end / width) + 1)):
                bins[row][i][kind] += min(one.end, (i + 1) * width) - max(one.start, i * width)
    bars: dict[str, list[list[Any]]] = {}  # row, begin and end of each bar of a kind
    for row, some in bins.items():
        last = ""
        for i, seconds in enumerate(some):
            kind = max(seconds, key=lambda name: seconds[name], default="")
            kind = kind if sum(seconds.values()) > width / 2 else ""
            if kind and kind == last:
                bars[kind][-1][2] = (i + 1) * width
            elif kind:
                bars.setdefault(kind, []).append([row, i * width, (i + 1) * width])
            last = kind
    made = figure(130 + 30 * len(bins), barmode="overlay", legend=ABOVE)
    names = {"memory_bound": "memory-bound", "exposed": "waits for messages"}
    for kind in sorted(bars, key=lambda kind: (kind.startswith("messages"), kind)):
        name = names.get(kind, kind)
        over = name.replace("messages ", "messages over ")
        color = COLORS.get("messages over row" if kind == "exposed" else over)
        made.add_bar(
            y=[row for row, _, _ in bars[kind]],
            x=[end - begin for _, begin, end in bars[kind]],
            base=[begin for _, begin, _ in bars[kind]],
            name=name,
            orientation="h",
            marker={"color": color},
            hovertemplate="%{base:.4g} s<extra>" + name + "</extra>",
        )
    rows = {"categoryarray": [*bins], "ticksuffix": "  "}
    made.update_yaxes(autorange="reversed", automargin=True, **rows)
    return made.update_xaxes(title="seconds")
