"""Horizontal bars of stacked parts, as HTML that needs no script, and the colors of the parts."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence

# Of runs that are compared.
RUNS = ("#3b82c4", "#e07b39", "#3fa45b", "#b65aa0", "#c9a227", "#6f6fd8", "#d0504a", "#2aa5a0")
Rows = Sequence[tuple[str, Mapping[str, float]]]

_OTHERS = ("#d0504a", "#c9a227", "#2aa5a0", "#b65aa0", "#6b8e23", "#e07b39", "#6f6fd8", "#8c6d46")
# States are blue, activations orange, and the rest green and gray.
_MEMORY = {
    "parameters": "#1f5a94",
    "gradients": "#3b82c4",
    "optimizer": "#7fb3dd",
    "activations: attention": "#a34708",
    "activations: feed-forward": "#d96b1c",
    "activations: norms": "#f0a35e",
    "activations: residuals": "#f5bf8a",
    "activations: embedding, loss": "#f8d5b0",
    "recomputed": "#3fa45b",
    "workspace": "#9aa3ab",
}
# What a process does. The script draws timelines in the same colors.
KINDS = {
    "forward": "#3b82c4",
    "backward": "#1f5a94",
    "update": "#3fa45b",
    "read the batch": "#8e6fd8",
    "wait for data": "#e0218a",
    "waits": "#f0a35e",
    "other": "#9aa3ab",
}
_BETWEEN = {"between": "#d9dde1"}
_AXES = {
    "row": "#2aa5a0",
    "col": "#d0504a",
    "grid": "#c9a227",
    "branch": "#6b8e23",
    "dp": "#b65aa0",
    "pp": "#6f6fd8",
    "world": "#8c6d46",
}
_WAITS = ("#f0a35e", "#e07b39", "#f5c99b", "#c9631f", "#f7dcc0")


def memory_colors(rows: Rows) -> dict[str, str]:
    """Returns the colors of what memory holds."""
    return _colors(rows, _MEMORY)


def time_colors(rows: Rows) -> dict[str, str]:
    """Returns the colors of what a process does. Waits for messages are shades of orange."""
    waits = sorted({kind for _, parts in rows for kind in parts if kind.startswith("waits for")})
    shades = {kind: _WAITS[i % len(_WAITS)] for i, kind in enumerate(waits)}
    known = {**KINDS, **_BETWEEN, **shades}
    rest = {kind for _, parts in rows for kind in parts} - {*known}
    return {**known, **dict.fromkeys(sorted(rest), KINDS["other"])}


def axis_colors(axes: Iterable[str]) -> dict[str, str]:
    """Returns the colors of the axes of layouts, which are the same wherever they are drawn."""
    return _colors([("", dict.fromkeys(axes, 1.0))], _AXES)


def bars(rows: Rows, colors: Mapping[str, str], unit: Callable[[float], str]) -> str:
    """Returns bars, all to the same scale, with a legend.

    Args:
        rows: For each bar its name and its parts.
        colors: The color of each part.
        unit: Writes a value with its unit.
    """
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0) or 1.0
    found = []
    for name, parts in rows:
        stack = "".join(
            f'<span style="width:{100 * value / longest:.3f}%;background:{colors[kind]}" '
            f'title="{html.escape(kind)}: {html.escape(unit(value))}"></span>'
            for kind, value in parts.items()
            if value > 0
        )
        total = html.escape(unit(sum(parts.values())))
        found.append(
            f'<span>{html.escape(name)}</span><div class="stack">{stack}</div><span>{total}</span>'
        )
    shown = [kind for kind in colors if any(parts.get(kind) for _, parts in rows)]
    legend = "".join(
        f'<span><span class="swatch" style="background:{colors[kind]}"></span>{html.escape(kind)}'
        "</span>"
        for kind in shown
    )
    return f'<div class="bars">{"".join(found)}</div><div class="keys">{legend}</div>'


def _colors(rows: Rows, known: Mapping[str, str]) -> dict[str, str]:
    others = sorted({kind for _, parts in rows for kind in parts} - {*known})
    return {**known, **{kind: _OTHERS[i % len(_OTHERS)] for i, kind in enumerate(others)}}
