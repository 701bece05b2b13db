"""Writes what a search has found as a page: ranking, where time goes, memory, timeline, outlook.

The page is one file that needs no network. plotly is an extra, see `gridformer.utils.errors`.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.plan import figures
from gridformer.plan.advice import Advice
from gridformer.plan.figures import Outlook
from gridformer.plan.price import doubts, sureness
from gridformer.plan.ranking import (
    common_warnings,
    hidden_s,
    layout_warnings,
    place,
    reasons,
    settings_between,
    unlisted,
    words_of_kind,
)
from gridformer.plan.search import Found, Kind, Result, Search, kind_of
from gridformer.utils.page import document, figure_place

if TYPE_CHECKING:
    import plotly.graph_objects as go

FACTORS = (0.25, 0.5, 1, 2, 4)  # of the batch and of the number of devices
_STYLE = "td:nth-child(2), th:nth-child(2) { text-align: left; } ul { margin-top: 4px; }"


def write_plan_page(
    run: RunConfig,
    cluster: Cluster,
    n_devices: int,
    result: Result,
    advice: Sequence[Advice],
    path: Path,
    remedies: Sequence[str] = (),
) -> None:
    """Writes the report.

    Args:
        run: The run that was asked for.
        cluster: The machine.
        n_devices: The number of devices.
        result: What was found. If it has no layout, the report says what would fit.
        advice: The advice for each layout.
        path: The file, whose folder is created if needed.
        remedies: What would fit if nothing does.
    """
    title = f"{run.model.name} on {n_devices} devices of {cluster.name}"
    heading = [
        f"<h1>{html.escape(title)}</h1>",
        _note(
            f"{run.train.global_batch} sequences of {run.seq_len} tokens a step, "
            f"{run.train.dtype}. {result.n_arrangements} arrangements were estimated, and the "
            "fastest were traced: the code of a step ran on tensors without memory, and the "
            "cluster file says what its kernels and messages take. Nothing here was measured."
        ),
    ]
    drawn: dict[str, go.Figure] = {}
    if result.layouts:
        sections = _sections(run, cluster, n_devices, result, advice, drawn)
    else:
        sections = [
            "<h2>Nothing fits</h2>",
            _list([*remedies, *unlisted(result)]),
            "<h2>How certain this is</h2>",
            _list(doubts(cluster, n_devices)),
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = document(title, "\n".join([*heading, *sections]), drawn, _STYLE)
    path.write_text(text, encoding="utf-8")


def _sections(
    run: RunConfig,
    cluster: Cluster,
    n: int,
    result: Result,
    advice: Sequence[Advice],
    drawn: dict[str, go.Figure],
) -> list[str]:
    """Returns the sections of a page, and puts the figures in them into `drawn`."""
    batch, best = run.train.global_batch, result.layouts[0]
    costs = Search(run, cluster, n).costs  # all of them remember the same messages
    factors = memory_factors([*result.layouts, *result.refused])

    @cache
    def best_of(b: int, k: int) -> Found | None:
        if (b, k) == (batch, n):
            return best
        return fastest_that_fits(Search(_with_batch(run, b), cluster, k, costs), factors)

    batches = outlook(FACTORS, batch, lambda b: best_of(b, n))
    devices = [k for k in (round(n * f) for f in FACTORS) if k <= cluster.size]
    counts = outlook([k / n for k in devices], n, lambda k: best_of(batch, k))
    unit = "sequences a second"
    drawn |= {
        "where": figures.where(result.listed),
        "memory": figures.memory_bars(result.listed),
        "timeline": figures.timeline(best, cluster),
        "batches": figures.outlook_line(batches, "global batch", unit, _per_second),
        "devices": figures.outlook_line(counts, "devices", unit, _per_second),
    }
    by_estimate = "The one in the ranking is predicted from its trace, and all others are estimated"
    return [
        "<h2>Ranking</h2>",
        _ranking(result),
        _list(unlisted(result)),
        "<h2>Where each second goes</h2>",
        _note(
            "The slowest rank of each layout, one optimizer step. Messages are those for which "
            "the device waits; those that travel while it computes are <i>hidden</i>, in the "
            "table above and below under the reasons."
        ),
        figure_place("where"),
        "<h2>Memory</h2>",
        _note("The fullest device of each layout, and what a device has for tensors."),
        figure_place("memory"),
        "<h2>Timeline of the best</h2>",
        _note(
            "The ranks that differ; all others do what one of these does. Each moment has the "
            "color of what takes most of it."
        ),
        figure_place("timeline"),
        "<h2>Why</h2>",
        _reasons(run, result, advice),
        "<h2>How certain this is</h2>",
        _list(certainty(result, cluster, [point.at for point in counts])),
        "<h2>Other batches</h2>",
        _note(f"The fastest layout for each batch. {by_estimate}."),
        figure_place("batches"),
        "<h2>Other numbers of devices</h2>",
        _note(f"The fastest layout for each number, with the same batch. {by_estimate}."),
        figure_place("devices"),
    ]


def certainty(result: Result, cluster: Cluster, counts: Iterable[int]) -> list[str]:
    """Returns sentences that say what makes a report less certain.

    Args:
        result: What was found, at least one layout.
        cluster: The machine.
        counts: The numbers of devices of which the report tells, too.
    """
    common = common_warnings(result.listed)
    found = [sureness(cluster, result.layouts[0].run.layout.n_processes)]
    found += [f"For all layouts: {warning}." for warning in common]
    said = {*common}
    for one in result.listed:
        mine = [warning for warning in layout_warnings(one) if warning not in common]
        found += [f"For {one.name}: {warning}." for warning in mine]
        said |= {*mine}
    for n in counts:
        more = [doubt for doubt in doubts(cluster, n) if doubt not in said]
        found += [f"On {n} devices: {doubt}." for doubt in more]
        said |= {*more}
    off = [
        100 * (one.estimate.step_s / one.prediction.step_s - 1)
        for one in result.listed
        if one.prediction
    ]
    least, most = _percent(min(off)), _percent(max(off))
    found.append(
        f"Estimates of the layouts in the ranking are {least} to {most} off their traces in time."
        if len(off) > 1
        else f"The estimate of the layout in the ranking is {least} off its trace in time."
    )
    return found


def _percent(value: float) -> str:
    """Returns a percentage with its sign, and 0% without one."""
    return f"{value:+.0f}%" if round(value) else "0%"


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


def memory_factors(traced: Sequence[Found]) -> dict[Kind, float]:
    """Returns how many times their estimated memory layouts need by their traces, at least 1.

    The largest of each kind counts; see `kind_of`.
    """
    found: dict[Kind, float] = {}
    for one in traced:
        if one.prediction is not None and one.prediction.peak_gib is not None:
            factor = one.prediction.peak_gib / one.estimate.peak_gib
            found[kind_of(one)] = max(1.0, factor, found.get(kind_of(one), 1.0))
    return found


def fastest_that_fits(search: Search, factors: dict[Kind, float]) -> Found | None:
    """Returns the fastest layout of a search that fits by estimate.

    Args:
        search: The search.
        factors: How many times their estimated memory layouts need, by kind.
    """
    ranked, _ = search.ranked(improved=8)
    for one in ranked:
        if one.estimate.peak_gib * factors.get(kind_of(one), 1.0) <= one.estimate.limit_gib:
            return one
    return None


def _with_batch(run: RunConfig, batch: int) -> RunConfig:
    return run.model_copy(update={"train": run.train.model_copy(update={"global_batch": batch})})


def _per_second(found: Found) -> float:
    return found.run.train.global_batch / found.step_s


# --------------------------------------------------------------------------- text


def _note(text: str) -> str:
    return f'<p class="note">{text}</p>'


def _list(sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def _ranking(result: Result) -> str:
    rows = []
    for found in result.listed:
        prediction = found.prediction
        assert prediction is not None, "only traced layouts are listed"
        cells = {
            "": str(place(result, found) or "-"),
            "layout": html.escape(found.name),
            "kind": words_of_kind(found),
            "s a step": f"{prediction.step_s:.4g}",
            "sequences/s": f"{found.run.train.global_batch / prediction.step_s:,.4g}",
            "TFLOP/s a device": f"{prediction.model_tflops_per_device:.4g}",
            "GiB": f"{prediction.peak_gib:.1f}",
            "limit, GiB": f"{prediction.limit_gib:.1f}",
            "s in messages": f"{prediction.exposed_communication_s:.3g}",
            "s hidden": f"{hidden_s(prediction):.3g}",
            "s in bubbles": f"{prediction.bubble_s:.3g}",
            "micro-batches": str(found.run.layout.micro_batches),
            "recompute": found.run.train.recompute,
        }
        rows.append("".join(f"<td>{cell}</td>" for cell in cells.values()))
    head = "".join(f"<th>{text}</th>" for text in cells)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _reasons(run: RunConfig, result: Result, advice: Sequence[Advice]) -> str:
    items = []
    for found, why in zip(result.listed, advice):
        text = " ".join(html.escape(sentence) for sentence in reasons(result, found, why))
        items.append(
            f"<li><b>{html.escape(found.name)}</b><br>{text}<br>"
            f"<code>{html.escape(settings_between(run, found.run))}</code></li>"
        )
    return f"<ol>{''.join(items)}</ol>"
