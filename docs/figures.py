"""Draws the figures of docs/concepts: `python docs/figures.py` writes docs/figures/*.svg.

One function a figure, one figure a scheme, all on the same block diagram: a transformer layer as
two rows, attention and feed-forward, each from `enter` to `leave`. The picture language:

- a color is a device; a block in that color is held there and nowhere else;
- stripes are copies: every device whose color occurs holds the whole block;
- a pile of sheets is a set of partial sums, one a device, still to be added up;
- near black is communication; a dashed outline is a place where none happens.

Lengths are inches, y grows upwards. The output is the same on every run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from drawing import (
    MARGIN,
    RULE,
    TILE,
    WIDTH,
    Block,
    Gate,
    Scheme,
    arrow,
    by_place,
    cut,
    draw_scheme,
    fill,
    summa_sign,
    whole,
    write,
)


def draw_summa_step(ax: Any, top: float) -> None:
    """Step l = 0 of C = A B on a 2 x 2 grid: two broadcasts, then every device multiplies."""
    ax.plot([MARGIN, WIDTH - MARGIN], [top + 0.32, top + 0.32], color=RULE, lw=0.8)
    summa_sign(ax, 0.48, top)
    title = "One SUMMA step, l = 0, of C = A · B"
    write(ax, 0.72, top, title, 11, weight="bold", ha="left")
    space, high = 0.36, top - 0.66
    lefts = (0.35, 2.95, 5.55)
    heads = (
        "1  A(i, l) travels along row i",
        "2  B(l, j) travels down column j",
        "3  C(i, j) += A(i, l) · B(l, j)",
    )
    for left, head in zip(lefts, heads):
        write(ax, left + TILE + space / 2, high + 0.22, head, 9.5, weight="bold")
    for i in range(2):
        for j in range(2):
            across, y = j * (TILE + space), high - TILE - i * (TILE + space)
            middles = [left + across + TILE / 2 for left in lefts]
            for middle in middles:
                draw_tile(ax, middle - TILE / 2, y, i, j)
            a, b, low = (f"A{i}0", 2 * i), (f"B0{j}", j), y + 0.14
            draw_panel(ax, middles[0], low, *a, owner=j == 0)
            draw_panel(ax, middles[1], low, *b, owner=i == 0)
            draw_panel(ax, middles[2] - 0.21, low, *a)
            draw_panel(ax, middles[2] + 0.21, low, *b)
            write(ax, middles[2], low + 0.15, "·", 13, weight="bold")
            write(ax, middles[2], low + 0.48, f"C{i}{j} +=")
    for k in range(2):
        along = k * (TILE + space) + TILE / 2
        x, y = lefts[0] + TILE + 0.03, high - along
        arrow(ax, x, y, x + space - 0.06, y, lw=2, head=12)
        x, y = lefts[1] + along, high - TILE - 0.03
        arrow(ax, x, y, x, y - space + 0.06, lw=2, head=12)
    words = (
        "A, B and C stay where they are;",
        "copies of the step’s panels travel.",
        "Step l = 1: the same from column 1",
        "of A and row 1 of B. Then C is whole.",
        "",
        "Backward, in the same steps:",
        "dA = dC · Bᵀ, sums along rows;",
        "dB = Aᵀ · dC, sums down columns.",
    )
    for k, line in enumerate(words):
        write(ax, 8.17, high - 0.18 - 0.235 * k, line, 9, ha="left")


def draw_tile(ax: Any, x: float, y: float, i: int, j: int) -> None:
    """Device (i, j), its bottom left at (x, y)."""
    fill(ax, x, y, TILE, TILE, (2 * i + j,), lw=1.0)
    inner = TILE - 0.10, TILE - 0.26
    ax.add_patch(Rectangle((x + 0.05, y + 0.05), *inner, facecolor="white", lw=0, zorder=4))
    write(ax, x + TILE / 2, y + TILE - 0.115, f"{i},{j}", 8)


def draw_panel(ax: Any, x: float, y: float, text: str, device: int, owner: bool = False) -> None:
    """A block inside a device's tile, in the color of where it lives; bold if it lives here."""
    fill(ax, x - 0.15, y, 0.3, 0.3, (device,), lw=2.2 if owner else 0.8, z=5)
    write(ax, x, y + 0.142, text, 8)


# ----------------------------------------------------------------- the figures

ABOVE_BELOW = "Above a tensor: all of it. Below: what one device holds."


def single() -> Any:
    """One device: the layer that the other schemes cut."""
    act = (whole(0), whole(0))
    scheme = Scheme(
        title="Single device",
        grid=(1, 1),
        subtitle="One layer. Tokens run downwards (two sequences drawn), h runs to the right; "
        "thin lines part the heads.",
        enter=Gate("enter"),
        leave=Gate("leave"),
        between=act,
        entered=act,
        inside=act,
        closed=act,
        opening=whole(0),
        closing=whole(0),
        opening_bias=whole(0),
        closing_bias=whole(0),
        norm=whole(0),
        local={"qkv bias": "[3h]", "out bias": "[h]", "up bias": "[f]", "down bias": "[h]"},
        moved="Nothing is cut, nothing is moved.",
    )
    return draw_scheme(scheme)


def megatron() -> Any:
    """One-dimensional tensor parallelism on a 1 x 4 grid."""
    return draw_scheme(_megatron())


def megatron_sequence() -> Any:
    """The sequence-parallel form on a 1 x 4 grid."""
    plain = _megatron()
    scheme = replace(
        plain,
        title="Megatron, sequence parallel",
        enter=Gate("enter", "all-gather s", "reduce-scatter s"),
        leave=Gate("leave", "reduce-scatter s", "all-gather s"),
        between=(cut(4, 1), cut(4, 1)),
        local={**plain.local, "x": "[b, s/c, h]"},
    )
    return draw_scheme(scheme)


def _megatron() -> Scheme:
    copies = (whole(0, 1, 2, 3), whole(0, 1, 2, 3))
    return Scheme(
        title="Megatron, 1-D",
        grid=(1, 4),
        subtitle=f"A grid of 1 × c devices, c = 4. {ABOVE_BELOW}",
        enter=Gate("enter", "identity", "all-reduce"),
        leave=Gate("leave", "all-reduce", "identity"),
        between=copies,
        entered=copies,
        inside=(cut(1, 4), cut(1, 4)),
        closed=(cut(4, 1), cut(4, 1)),
        opening=cut(1, 4),
        closing=cut(4, 1),
        opening_bias=cut(1, 4, labels=False),
        closing_bias=whole(0),
        norm=whole(0, 1, 2, 3),
        local={
            "x": "[b, s, h]",
            "entered": "[b, s, h]",
            "qkv": "[h, 3h/c]",
            "qkv bias": "[3h/c]",
            "QKV": "[b, s, 3h/c], n/c heads",
            "o": "[b, s, h/c]",
            "out": "[h/c, h]",
            "out bias": "[h]",
            "up": "[h, f/c]",
            "up bias": "[f/c]",
            "f": "[b, s, f/c]",
            "down": "[f/c, h]",
            "down bias": "[h]",
            "y": "[b, s, h]",
        },
        moved="A device receives 4(c−1)/c · bsh elements a layer in the forward pass.",
        partial=True,
    )


def super_dsp() -> Any:
    """Sub-graph parallelism (D&SP) with two sub-grids of one device."""
    plain = _megatron()
    both = (whole(0, 1), whole(0, 1))
    local = {name: shape.replace("/c", "/g") for name, shape in plain.local.items()}
    scheme = replace(
        plain,
        title="SUPER, D&SP",
        grid=(1, 2),
        subtitle=f"g sub-grids of one device, g = 2. {ABOVE_BELOW}",
        enter=Gate("split", "all-gather b", "reduce-scatter b"),
        leave=Gate("sum", "reduce-scatter b", "all-gather b"),
        between=(whole(0), whole(1)),
        entered=both,
        inside=(cut(1, 2), cut(1, 2)),
        closed=(cut(2, 1), cut(2, 1)),
        opening=cut(1, 2),
        closing=cut(2, 1),
        opening_bias=cut(1, 2, labels=False),
        closing_bias=whole(0, 1),
        norm=whole(0, 1),
        local={**local, "x": "[b/g, s, h]"},
        moved="A device receives 4(g−1)/g · bsh elements a layer in the forward pass.",
        axis="branch",
    )
    return draw_scheme(scheme)


def optimus() -> Any:
    """Two-dimensional tensor parallelism on a 2 x 2 grid, and one SUMMA step."""
    act = (by_place(cut(1, 2)), by_place(cut(1, 2, first=2)))
    matrix = by_place(cut(2, 2))
    vector = [Block(0, 0, 0.5, 1, (0, 2)), Block(0.5, 0, 0.5, 1, (1, 3))]
    scheme = Scheme(
        title="Optimus, 2-D",
        grid=(2, 2),
        subtitle=f"A grid of r × c devices, r = c = 2. {ABOVE_BELOW}",
        enter=Gate("enter"),
        leave=Gate("leave"),
        between=act,
        entered=act,
        inside=act,
        closed=act,
        opening=matrix,
        closing=matrix,
        opening_bias=vector,
        closing_bias=vector,
        norm=vector,
        local={
            "x": "[b/r, s, h/c]",
            "entered": "[b/r, s, h/c]",
            "qkv": "[h/r, 3h/c]",
            "qkv bias": "[3h/c]",
            "QKV": "[b/r, s, 3h/c], n/c heads",
            "o": "[b/r, s, h/c]",
            "out": "[h/r, h/c]",
            "out bias": "[h/c]",
            "up": "[h/r, f/c]",
            "up bias": "[f/c]",
            "f": "[b/r, s, f/c]",
            "down": "[f/r, h/c]",
            "down bias": "[h/c]",
            "y": "[b/r, s, h/c]",
        },
        moved="A device receives (c−1)/(rc) · 7bsh + (r−1)/(rc) · 12h² elements a layer "
        "in the forward pass, products only.",
        summa=True,
    )
    ax = draw_scheme(scheme, extra=3.68)
    draw_summa_step(ax, 3.24)
    return ax


FIGURES: dict[str, Callable[[], Any]] = {
    "single": single,
    "megatron": megatron,
    "megatron-sequence": megatron_sequence,
    "optimus": optimus,
    "super": super_dsp,
}


def main(folder: Path, suffix: str = "svg") -> None:
    """Draw every figure into `folder` as FIGURE.suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    style = {
        "font.family": "DejaVu Sans",  # comes with matplotlib
        "svg.fonttype": "path",
        "svg.hashsalt": "gridformer",
    }
    metadata = {"Date": None, "Creator": None} if suffix == "svg" else {}
    with plt.rc_context(style):
        for name, draw in FIGURES.items():
            figure = draw().figure
            figure.savefig(folder / f"{name}.{suffix}", metadata=metadata, dpi=110)
            plt.close(figure)


if __name__ == "__main__":
    here = Path(__file__).parent / "figures"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else here, *sys.argv[2:3])
