"""HTML pages in one file that needs no network, with plotly's figures, for screens and paper."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go

STYLE = """
:root { --text: #222; --soft: #555; --line: #ddd; --code: #f3f3f3; --page: #fff;
  color-scheme: light dark; }
@media screen and (prefers-color-scheme: dark) {
  :root { --text: #e4e4e4; --soft: #a2a7ad; --line: #3a3f45; --code: #2a2e33; --page: #16181b; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 1080px; margin: 32px auto; padding: 0 24px; }
h1 { font-size: 26px; margin-bottom: 4px; } h2 { font-size: 19px; margin: 36px 0 4px; }
p.note { color: var(--soft); margin-top: 0; }
code { background: var(--code); padding: 1px 4px; font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
td, th { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--line); }
td:first-child { text-align: left; }
ol li { margin-bottom: 12px; }
.scroll { overflow-x: auto; } .figure { min-width: 640px; }
@media print { h2, h3 { break-after: avoid; } tr, .figure { break-inside: avoid; } }
"""
# Figures are JSON that no text in it can end, and this script alone may draw them.
_DRAW = """
const figures = JSON.parse(document.getElementById("figures").textContent);
for (const [name, {data, layout}] of Object.entries(figures)) {
  Plotly.newPlot(name, data, layout, {responsive: true, displayModeBar: false});
}
"""
ABOVE = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "traceorder": "normal"}


def document(title: str, body: str, figures: Mapping[str, go.Figure], style: str = "") -> str:
    """Returns a whole page, which loads nothing and runs no script but its own.

    Args:
        title: The title, as text.
        body: HTML in which all text is escaped.
        figures: The figures by the name that `figure_place` was given.
        style: More CSS.
    """
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    if figures:
        from plotly.offline import get_plotlyjs

        data = ",".join(f'"{name}":{figure.to_json()}' for name, figure in figures.items())
        data = f"{{{data}}}".replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
        body += f'\n<script type="application/json" id="figures">{data}</script>'
        scripts = [get_plotlyjs(), _DRAW]
        # A script that a name from a run could bring in would have another checksum.
        hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()) for one in scripts]
        sums = " ".join(f"'sha256-{one.decode()}'" for one in hashes)
        loads = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:"
        rules = f"{loads}; script-src {sums}"
        head += f'<meta http-equiv="Content-Security-Policy" content="{rules}">'
        body += "".join(f"\n<script>{script}</script>" for script in scripts)
    head += f"<title>{html.escape(title)}</title><style>{STYLE}{style}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>\n"


def figure_place(name: str) -> str:
    """Returns the element of a page in which a figure is drawn; on phones it scrolls sideways."""
    return f'<div class="scroll"><div class="figure" id="{name}"></div></div>'


def figure(height: int, made: go.Figure | None = None, **layout: Any) -> go.Figure:
    """Returns a figure, or an empty one, that can be read on light and dark pages.

    Args:
        height: Its height in pixels.
        layout: More of plotly's layout.
    """
    import plotly.graph_objects as go

    made = go.Figure() if made is None else made
    line = {"gridcolor": "rgba(128,128,128,0.25)", "zerolinecolor": "rgba(128,128,128,0.5)"}
    made.update_layout(
        template="none",
        height=height,
        margin={"l": 60, "r": 20, "t": 40, "b": 45},
        font={"size": 13, "color": "#808080", "family": "system-ui, sans-serif"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )
    made.update_layout(**layout)
    made.update_xaxes(**line)
    made.update_yaxes(**line)
    return made


def stacked_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    colors: Mapping[str, str],
    axis: str,
    unit: Callable[[float], str],
) -> go.Figure:
    """Returns horizontal bars of stacked parts, all to one scale.

    Args:
        rows: For each bar its name, which no other has, and its parts, as text that is not escaped.
        colors: The color of each part, in the order of the legend.
        axis: The name of the axis of values, which `unit` writes.
    """
    made = figure(130 + 34 * len(rows), barmode="stack", legend=ABOVE)
    names = [html.escape(name) for name, _ in rows]
    for kind, color in colors.items():
        values = [parts.get(kind, 0.0) for _, parts in rows]
        if any(values):
            made.add_bar(
                y=names,
                x=values,
                name=html.escape(kind),
                orientation="h",
                marker={"color": color},
                hovertext=[html.escape(f"{kind}: {unit(value)}") for value in values],
                hoverinfo="text",
            )
    made.update_yaxes(type="category", autorange="reversed", automargin=True, ticksuffix="  ")
    made.update_xaxes(title=axis)
    return made
