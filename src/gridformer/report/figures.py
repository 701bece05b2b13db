"""The figures of a report: curves of all metrics, and the timeline of a step."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gridformer.report.reading import RunReading, marks_of
from gridformer.report.steptrace import Slice, StepTimeline
from gridformer.train.metrics import smoothed, spelled
from gridformer.utils.page import ABOVE, figure
from gridformer.utils.units import three_digits

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_POINTS = 1200  # of a curve; a screen is not wider
_MOST_NAMED = 12  # layers; the colors of more show how deep they are
_SMOOTHING = 0.6  # the weight of the values before
_RUNS = ("#3b82c4", "#e07b39", "#3fa45b", "#b65aa0", "#c9a227", "#6f6fd8", "#d0504a", "#2aa5a0")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_MARKS = {"start": ("triangle-up", "#e0218a"), "trouble": ("x", "#d62728")}
# What a process does.
KINDS = {
    "forward": "#3b82c4",
    "backward": "#1f5a94",
    "weight": "#5f8f3f",
    "update": "#3fa45b",
    "read the batch": "#8e6fd8",
    "wait for data": "#e0218a",
    "between": "#d9dde1",
    "other": "#9aa3ab",
}
_WAITS = ("#f0a35e", "#e07b39", "#f5c99b", "#c9631f", "#f7dcc0")
_AXES = {
    "row": "#2aa5a0",
    "col": "#d0504a",
    "grid": "#c9a227",
    "branch": "#6b8e23",
    "dp": "#b65aa0",
    "pp": "#6f6fd8",
    "world": "#8c6d46",
}


class Chart(NamedTuple):
    """A chart, and the metrics in it."""

    title: str
    unit: str
    keys: tuple[str, ...]  # the names of the metrics
    factor: float = 1.0  # by which the values of metrics.jsonl are multiplied
    smooth: bool = False  # whether its curves can be smoothed
    zero: bool = False  # whether the vertical axis begins at 0


_OPERATIONS = "model_tflops", "hardware_tflops"
_KNOWN = (
    Chart("Learning rate", "", ("lr",), zero=True),
    Chart("Gradient norm", "before clipping", ("grad_norm",), smooth=True),
    Chart("Speed", "tokens/s", ("tokens_per_s",), smooth=True, zero=True),
    Chart("Utilization (MFU)", "% of the peak", ("mfu", "hfu"), 100.0, smooth=True, zero=True),
    Chart("Operations", "TFLOP/s of each process", _OPERATIONS, smooth=True, zero=True),
    Chart("Time of a step", "seconds", ("step_time_s", "data_wait_s"), smooth=True, zero=True),
    Chart("Memory", "GiB at the peak of the fullest process", ("peak_memory_gib",), zero=True),
    Chart("Loss scale", "", ("loss_scale",)),
    Chart("Fullest expert", "load relative to the mean", ("experts_fullest",), smooth=True),
    Chart("Experts without tokens", "% of all", ("experts_idle",), 100.0, smooth=True, zero=True),
    Chart("Skipped steps", "since the run began", ("skipped",), zero=True),
    Chart("Saving", "seconds", ("save_s", "save_stall_s"), zero=True),
)
_NOT_DRAWN = {"tokens", "rollbacks"}
_NAMES = {
    "loss": "Training loss",
    "loss_balance": "Balance of experts",
    "mfu": "MFU",
    "hfu": "HFU",
    "step_time_s": "All of it",
    "data_wait_s": "Waiting for data",
    "save_s": "Until a checkpoint is complete",
    "save_stall_s": "Training waits for it",
}


def chart_list(runs: Sequence[RunReading]) -> list[Chart]:
    """Returns the charts that some runs have values for, the losses first."""
    keys = [*dict.fromkeys(key for run in runs for key in run.names)]
    validation = [key for key in keys if key.startswith(("val_loss_", "test_loss_"))]
    losses = (*(key for key in ("loss", "val_loss") if key in keys), *validation)
    parts = tuple(key for key in keys if key.startswith("loss_") and key != "loss_scale")
    squared = [run.config is not None and run.config.task == "regression" for run in runs]
    unit = ", or ".join(
        ["nats per target"] * (not all(squared)) + ["mean squared error"] * any(squared)
    )
    charts = [Chart("Loss", unit, losses, smooth=True)] * bool(losses)
    charts += [Chart("Parts of the training loss", unit, parts, smooth=True)] * bool(parts)
    known = {*losses, *parts, *_NOT_DRAWN, *(key for chart in _KNOWN for key in chart.keys)}
    charts += [Chart(words(key), "", (key,)) for key in keys if key not in known]
    for chart in _KNOWN:
        here = tuple(key for key in chart.keys if key in keys)
        if not here or (chart.keys == _OPERATIONS and "mfu" in keys):
            continue  # utilization is the same curve in another unit
        if len(here) == 2 and all(run.series(here[0]) == run.series(here[1]) for run in runs):
            here = here[:1]  # nothing is recomputed
        charts.append(chart._replace(keys=here))
    return charts


def words(key: str) -> str:
    """Returns the name of a metric as a heading: `val_exact_match` is `Validation exact match`."""
    if key in _NAMES:
        return _NAMES[key]
    group, _, rest = key.partition("_")
    text = spelled(f"validation_{rest}" if group == "val" else key)
    return text[:1].upper() + text[1:]


Places = dict[str, list[float]]  # of the points of a trace along each horizontal axis


def curves(runs: Sequence[RunReading]) -> go.Figure:
    """Returns one figure with all charts, whose horizontal axes are enlarged together."""
    from plotly.subplots import make_subplots

    charts = chart_list(runs)
    n_rows = 1 + len(charts) // 2
    notes = (f"<br><sup>{chart.unit}</sup>" if chart.unit else "" for chart in charts)
    made = make_subplots(
        n_rows,
        2,
        specs=[[{"colspan": 2}, None], *([{}, {}] for _ in range(n_rows - 1))],
        subplot_titles=[html.escape(chart.title) + note for chart, note in zip(charts, notes)],
        row_heights=[1.6, *[1.0] * (n_rows - 1)],
        vertical_spacing=0.35 / n_rows,
        horizontal_spacing=0.09,
    )
    figure(380 + 235 * (n_rows - 1), made, hovermode="closest")
    traces: list[Places] = []
    for number, chart in enumerate(charts):
        at = {"row": 1 + (number + 1) // 2, "col": 1 + (number + 1) % 2 if number else 1}
        for i, run in enumerate(runs):
            for k in range(len(chart.keys)):
                traces += _add_curve(made, chart, k, run, i if len(runs) > 1 else None, at)
        made.update_yaxes(rangemode="tozero" if chart.zero else "normal", **at)
    for run in runs:
        traces += _add_marks(made, run)
    made.update_xaxes(matches="x", showticklabels=True)
    made.layout.xaxis.matches = None
    made.update_layout(
        margin={"t": 120},
        legend={"orientation": "h", "yref": "container", "y": 1, "yanchor": "top", "x": 0},
        updatemenus=_menus(traces, len(charts)),
    )
    named: set[str | None] = set()
    for trace in made.data:  # each run or metric once in the legend
        trace.showlegend = bool(trace.showlegend) and trace.name not in named
        named |= {trace.name} if trace.showlegend else set()
    return made


def _add_curve(
    made: go.Figure, chart: Chart, k: int, run: RunReading, number: int | None, at: dict[str, int]
) -> list[Places]:
    """Draws a metric of a run: with several runs in the color of the run, whose number it has."""
    key, metric = chart.keys[k], words(chart.keys[k]) if len(chart.keys) > 1 else chart.title
    steps, values = run.series(key)
    if not steps:
        return []
    kept = decimated(values, MOST_POINTS)
    raw = [_short(chart.factor * values[j]) for j in kept]
    x = _places(run, [steps[j] for j in kept])
    several = len(chart.keys) > 1 and chart.title != "Loss"
    name = run.label if number is not None else f"{chart.title}: {metric}" * several or metric
    style = {
        "x": x["steps"],
        "name": html.escape(name),
        "legendgroup": name,
        "line": {
            "color": _RUNS[(k if number is None else number) % len(_RUNS)],
            "dash": "solid" if number is None else _DASHES[k % len(_DASHES)],
        },
        **at,
    }
    sparse = key.startswith(("val_", "test_")) or len(steps) < 0.5 * len(run.metrics)
    smooth = chart.smooth and not sparse and len(raw) > 2
    if smooth:
        made.add_scatter(
            y=raw, mode="lines", opacity=0.3, hoverinfo="skip", showlegend=False, **style
        )
    dots = (sparse and len(raw) < 200) or len(raw) == 1
    made.add_scatter(
        y=[_short(y) for y in smoothed(raw, _SMOOTHING)] if smooth else raw,
        mode="lines+markers" if dots else "lines",
        showlegend=number is not None or len(chart.keys) > 1,
        hovertemplate=f"%{{y:.5g}} {html.escape(metric)}<extra>%{{fullData.name}}</extra>",
        **style,
    )
    return [x] * (1 + smooth)


def _add_marks(made: go.Figure, run: RunReading) -> list[Places]:
    """Marks on the curve of the loss where a run was resumed and what went wrong."""
    steps, values = run.series("loss")
    marks = [mark for mark in marks_of(run) if mark.kind in _MARKS and mark.step]
    if not marks or not steps:
        return []
    x = _places(run, [mark.step for mark in marks])
    made.add_scatter(
        x=x["steps"],
        y=[_short(y) for y in np.interp(x["steps"], steps, values)],
        mode="markers",
        name="restarts and troubles",
        legendgroup="marks",
        showlegend=True,
        marker={
            "symbol": [_MARKS[mark.kind][0] for mark in marks],
            "color": [_MARKS[mark.kind][1] for mark in marks],
            "size": 10,
        },
        hovertext=[html.escape(f"{run.label}: {mark.text}") for mark in marks],
        hoverinfo="text",
        row=1,
        col=1,
    )
    return [x]


def _menus(traces: Sequence[Places], n_charts: int) -> list[dict[str, Any]]:
    """Returns the menus above the curves: the horizontal axis, and the vertical one."""
    verticals = [f"yaxis{i if i > 1 else ''}.type" for i in range(1, n_charts + 1)]
    whole = {"xaxis.autorange": True}
    places = {name: [x[name] for x in traces] for name in ("steps", "tokens", "hours")}
    over = [
        {"label": f"over {name}", "method": "update", "args": [{"x": xs}, whole]}
        for name, xs in places.items()
    ]
    kinds = [
        {"label": kind, "method": "relayout", "args": [dict.fromkeys(verticals, kind)]}
        for kind in ("linear", "log")
    ]
    corner = {"x": 0.0, "xanchor": "left", "y": 1.0, "yanchor": "bottom"}
    style = {**corner, "bgcolor": "rgba(128,128,128,0.1)"}
    return [
        {"buttons": buttons, "pad": {"b": 48, "l": left}, **style}
        for buttons, left in ((over, 0), (kinds, 150))
    ]


def _places(run: RunReading, steps: Sequence[float]) -> Places:
    """Returns steps, and the tokens and hours after each of them, by lines between known ones."""
    lines = run.metrics
    known = [line["step"] for line in lines]
    tokens = [*accumulate((_number(line, "tokens") for line in lines), max)]
    hours = [*accumulate(_number(line, "step_time_s") / 3600 for line in lines)]
    return {"steps": [*steps]} | {
        name: [_short(value) for value in np.interp(steps, known, values)]
        for name, values in (("tokens", tokens), ("hours", hours))
    }


def _number(line: dict[str, Any], key: str) -> float:
    value = line.get(key)
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e300 else 0.0


def decimated(values: Sequence[float], most: int) -> list[int]:
    """Returns the places of at most `most` values that show the same curve.

    Of each of equal parts it takes the smallest and the largest value, so no spike is lost, and it
    takes the first and the last of all.
    """
    n = len(values)
    if n <= most:
        return [*range(n)]
    parts = (most - 2) // 2
    kept = {0, n - 1}
    for part in range(parts):
        places = range(part * n // parts, (part + 1) * n // parts)
        kept |= {min(places, key=values.__getitem__), max(places, key=values.__getitem__)}
    return sorted(kept)


def _short(value: float) -> float:
    """Returns a value with six digits, which a curve on a screen does not need."""
    return float(f"{value:.6g}")


def expert_loads(run: RunReading) -> go.Figure | None:
    """Returns the load of the fullest expert of each layer; None if the run has no experts."""
    from plotly.colors import sample_colorscale

    steps, layers = run.expert_loads()
    if not layers:
        return None
    made = figure(380, legend=ABOVE, hovermode="closest")
    first = run.config.model.dense_layers if run.config else 0
    depths = [i / max(1, len(layers) - 1) for i in range(len(layers))]
    for number, (loads, color) in enumerate(zip(layers, sample_colorscale("Bluered", depths))):
        kept = decimated(loads, MOST_POINTS // 4)
        made.add_scatter(
            x=[steps[i] for i in kept],
            y=[_short(loads[i]) for i in kept],
            mode="lines+markers" if len(steps) == 1 else "lines",
            name=f"layers.{first + number}",
            line={"color": color, "width": 1.5},
            hovertemplate="%{y:.3g} at step %{x}",
            showlegend=len(layers) <= _MOST_NAMED,
        )
    if len(layers) > _MOST_NAMED:
        scale = {"colorscale": "Bluered", "cmin": first, "cmax": first + len(layers) - 1}
        bar = {"colorbar": {"title": "layer"}, "showscale": True, "color": [first], **scale}
        made.add_scatter(x=[None], y=[None], mode="markers", showlegend=False, marker=bar)
    made.update_xaxes(title="step")
    ticks = (1, 1.2, 1.5, 2, 3, 4, 6, 10, 20, 50, 100, 200, 500)
    made.update_yaxes(title="load relative to the mean", type="log", tickvals=ticks)
    return made


# --------------------------------------------------------------------------- one step


def time_colors(rows: Sequence[tuple[str, Mapping[str, float]]]) -> dict[str, str]:
    """Returns the colors of what a process does. Waits for messages are shades of orange."""
    kinds = sorted({kind for _, parts in rows for kind in parts} - {*KINDS})
    waits = [kind for kind in kinds if kind.startswith("waits for")]
    shades = {kind: _WAITS[i % len(_WAITS)] for i, kind in enumerate(waits)}
    return KINDS | shades | {kind: KINDS["other"] for kind in kinds if kind not in shades}


def axis_colors(axes: Sequence[str]) -> dict[str, str]:
    """Returns the colors of the axes of layouts, which are the same wherever they are drawn."""
    others = sorted({*axes} - {*_AXES})
    return {**_AXES, **{axis: _RUNS[i % len(_RUNS)] for i, axis in enumerate(others)}}


def timeline(line: StepTimeline) -> go.Figure:
    """Returns what each process did when, its waits, and below that its messages under way."""
    made = figure(130 + 44 * len(line.names), legend=ABOVE, hovermode="closest")
    tracks: list[tuple[str, str, float, int, list[tuple[int, Slice]]]] = []
    work = _by_kind(line.work, lambda kind: kind if kind in KINDS else "other")
    tracks += [(kind, KINDS[kind], 0.0, 16, work[kind]) for kind in KINDS if kind in work]
    if waits := [one for both in _by_kind(line.waits, str).values() for one in both]:
        tracks.append(("waits for messages", _WAITS[0], 0.0, 16, waits))
    messages = _by_kind(line.messages, str)
    colors = axis_colors([*messages])
    tracks += [
        (f"messages over {axis}", colors[axis], 0.34, 5, messages[axis])
        for axis in sorted(messages)
    ]
    for name, color, below, width, slices in tracks:
        texts = [
            html.escape(f"{one.name}: {three_digits(one.end - one.start)} ms") for _, one in slices
        ]
        made.add_scatter(
            x=[x for _, one in slices for x in (round(one.start, 3), round(one.end, 3), None)],
            y=[y for row, _ in slices for y in (row + below, row + below, None)],
            mode="lines",
            name=html.escape(name),
            line={"color": color, "width": width, "simplify": False},
            hovertext=[text for one in texts for text in (one, one, "")],
            hoverinfo="text",
        )
    names = [html.escape(name) for name in line.names]
    made.update_yaxes(
        tickvals=[*range(len(names))],
        ticktext=names,
        range=[len(names) - 0.4, -0.5],
        automargin=True,
        ticksuffix="  ",
    )
    made.update_xaxes(title="milliseconds")
    return made


def _by_kind(
    rows: Sequence[Sequence[Slice]], name: Callable[[str], str]
) -> dict[str, list[tuple[int, Slice]]]:
    kinds: dict[str, list[tuple[int, Slice]]] = {}
    for row, slices in enumerate(rows):
        for one in slices:
            kinds.setdefault(name(one.kind), []).append((row, one))
    return kinds
