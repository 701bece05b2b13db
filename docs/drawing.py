"""The drawing primitives of docs/figures.py: blocks, stripes, piles, gates, and a layer of them.

Lengths are inches, y grows upwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle

FILLS = ("#8EBBE8", "#F5B56E", "#94CF98", "#D9A3D6")  # devices 0 to 3
INK, MUTED, EDGE, BAND, RULE = "#1F2733", "#667085", "#39424E", "#F1F3F6", "#C9CFD8"

H = 0.48  # drawn width of h; f is 4 of them
S = 0.58  # drawn height of one sequence's s tokens
GAP = 0.06  # between the two sequences drawn
TALL = 2 * S + GAP
WIDTH, MARGIN = 11.0, 0.35
TILE = 0.97  # side of a device in the picture of a SUMMA step


@dataclass(frozen=True)
class Block:
    """A rectangle, in fractions of the sheet it is on from its top left, and who holds it."""

    x: float
    y: float
    w: float
    h: float
    holders: tuple[int, ...]
    label: str = ""


Sheet = list[Block]  # a matrix, a vector, or one sequence of an activation
Act = tuple[Sheet, Sheet]  # an activation: the two sequences that are drawn


@dataclass(frozen=True)
class Tensor:
    """A drawn tensor: its sheets from top to bottom, and the words above and below it."""

    name: str
    shape: str
    sheets: Sequence[Sheet]
    width: float
    sheet_height: float
    local: str = ""
    n_heads: int = 0  # thin separators
    pile: bool = False  # partial sums: each block of a sheet is one device's
    bias: Sheet = field(default_factory=list)
    bias_local: str = ""

    @property
    def height(self) -> float:
        return len(self.sheets) * (self.sheet_height + GAP) - GAP


@dataclass(frozen=True)
class Gate:
    """What happens at an end of a section; no words mean nothing does."""

    name: str
    forward: str = ""
    backward: str = ""


@dataclass(frozen=True)
class Scheme:
    """All that differs between the figures."""

    title: str
    grid: tuple[int, int]
    subtitle: str
    enter: Gate
    leave: Gate
    between: Act  # activations between sections
    entered: Act  # after `enter`
    inside: Act  # between the opening and the closing product
    closed: Act  # after the closing product
    opening: Sheet  # weight of the opening product
    closing: Sheet
    opening_bias: Sheet
    closing_bias: Sheet
    norm: Sheet
    local: dict[str, str]  # shape on one device, by tensor
    moved: str
    partial: bool = False  # the closing product gives partial sums
    summa: bool = False
    axis: str = "col"  # that runs to the right


# ----------------------------------------------------------------- ways to cut a sheet


def whole(*devices: int) -> Sheet:
    """One block, of which each device has a copy."""
    return [Block(0, 0, 1, 1, devices)]


def cut(r: int, c: int, first: int = 0, labels: bool = True) -> Sheet:
    """r x c equal blocks for as many devices, in row-major order."""
    blocks = []
    for i in range(r):
        for j in range(c):
            device = first + i * c + j
            label = str(device) if labels else ""
            blocks.append(Block(j / c, i / r, 1 / c, 1 / r, (device,), label))
    return blocks


def by_place(sheet: Sheet) -> Sheet:
    """The same blocks, labeled by place in the 2 x 2 grid instead of by number."""
    return [replace(k, label="{},{}".format(*divmod(k.holders[0], 2))) for k in sheet]


# ----------------------------------------------------------------- strokes


def new_figure(height: float) -> Any:
    """Axes in inches over a whole white page."""
    figure = plt.figure(figsize=(WIDTH, height), facecolor="white")
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(0, height))
    ax.axis("off")
    return ax


def write(
    ax: Any, x: float, y: float, text: str, size: float = 8.5, color: str = INK, **style: str
) -> None:
    style = {"ha": "center", "va": "center", **style}
    ax.text(x, y, text, fontsize=size, color=color, zorder=9, **style)


def fill(
    ax: Any,
    x: float,
    y: float,
    w: float,
    h: float,
    holders: Sequence[int],
    lw: float = 0.7,
    z: float = 3,
) -> None:
    """A rectangle, its bottom left at (x, y), in its holder's color or striped in all of them."""
    ax.add_patch(Rectangle((x, y), w, h, facecolor=FILLS[holders[0]], lw=0, zorder=z))
    if len(holders) > 1:
        band = 0.085
        for k in range(int((w + h) / band) + 1):
            corners = stripe(x, y, w, h, k * band, (k + 1) * band)
            color = FILLS[holders[k % len(holders)]]
            ax.add_patch(Polygon(corners, facecolor=color, lw=0, zorder=z + 0.1))
    ax.add_patch(Rectangle((x, y), w, h, facecolor="none", edgecolor=EDGE, lw=lw, zorder=z + 0.2))


Corners = list[tuple[float, float]]


def stripe(x: float, y: float, w: float, h: float, t0: float, t1: float) -> Corners:
    """The part of a rectangle where t0 <= dx + dy <= t1 (two cuts of Sutherland and Hodgman)."""

    def keep(corners: Corners, inside: Callable[[float], float]) -> Corners:
        kept: Corners = []
        for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1]):
            a, b = inside(ax - x + ay - y), inside(bx - x + by - y)
            if a >= 0:
                kept.append((ax, ay))
            if a * b < 0:
                k = a / (a - b)
                kept.append((ax + k * (bx - ax), ay + k * (by - ay)))
        return kept

    corners = [(x, y), (x + w, y), (x + w, y + h), (x, y + h)]
    return keep(keep(corners, lambda t: t - t0), lambda t: t1 - t)


def arrow(
    ax: Any,
    x0: float,
    y0: float,
    x1: float,
    y1: float,
    color: str = INK,
    lw: float = 1.1,
    head: float = 7,
) -> None:
    style: dict[str, Any] = {
        "arrowstyle": "-|>",
        "mutation_scale": head,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    ax.add_patch(FancyArrowPatch((x0, y0), (x1, y1), color=color, lw=lw, zorder=6, **style))


def norm_sign(ax: Any, x: float, y: float) -> None:
    """A norm that communicates."""
    w, h = 0.48, 0.2
    shape = f"round,pad=0,rounding_size={h / 2}"
    corner = (x - w / 2, y - h / 2)
    ax.add_patch(FancyBboxPatch(corner, w, h, boxstyle=shape, facecolor=INK, lw=0, zorder=7))
    write(ax, x, y - 0.005, "norm", 7.5, "white", weight="bold")


def summa_sign(ax: Any, x: float, y: float) -> None:
    """A product that communicates."""
    ax.add_patch(Circle((x, y), 0.125, facecolor=INK, lw=0, zorder=7))
    write(ax, x, y - 0.012, "×", 13, "white", weight="bold")


# ----------------------------------------------------------------- parts of the diagram


def draw_sheet(ax: Any, x: float, top: float, w: float, h: float, sheet: Sheet) -> None:
    for k in sheet:
        fill(ax, x + k.x * w, top - (k.y + k.h) * h, k.w * w, k.h * h, k.holders)
        size = 6.5 if k.w * w < 0.28 else 7.0
        write(ax, x + (k.x + k.w / 2) * w, top - (k.y + k.h / 2) * h - 0.008, k.label, size)


def draw_pile(ax: Any, x: float, top: float, w: float, h: float, sheet: Sheet) -> None:
    """Every block as a sheet of its own, one behind the other."""
    for k, block in enumerate(sheet):
        shift = 0.045 * ((len(sheet) - 1) / 2 - k)
        fill(ax, x + shift, top - h + shift, w, h, block.holders, z=3 + 0.3 * k)
    write(ax, x + w / 2 + shift, top - h / 2 + shift, "Σ", 11)


def draw_tensor(ax: Any, x: float, y: float, t: Tensor) -> None:
    """A tensor with its left edge at x, centred at height y, with its words."""
    top, low, middle = y + t.height / 2, y - t.height / 2, x + t.width / 2
    for n, sheet in enumerate(t.sheets):
        high = top - n * (t.sheet_height + GAP)
        draw = draw_pile if t.pile else draw_sheet
        draw(ax, x, high, t.width, t.sheet_height, sheet)
        for k in range(1, t.n_heads):
            line = x + k * t.width / t.n_heads
            ends = [high, high - t.sheet_height]
            ax.plot([line, line], ends, color=EDGE, lw=0.35, alpha=0.55, zorder=4)
    if t.pile:
        top, low = top + 0.07, low - 0.07
    write(ax, middle, top + 0.30, t.name, 9.5, weight="bold")
    write(ax, middle, top + 0.12, t.shape, color=MUTED)
    if t.bias:
        draw_sheet(ax, x, low - 0.05, t.width, 0.09, t.bias)
        low -= 0.14
    for k, words in enumerate(filter(None, (t.local, t.bias_local and f"bias {t.bias_local}"))):
        write(ax, middle, low - 0.14 - 0.17 * k, words)


def draw_gate(ax: Any, x: float, low: float, high: float, gate: Gate) -> None:
    """An end of a section: a bar from low to high, with what it does above it."""
    bar = Rectangle((x - 0.05, low), 0.1, high - low, facecolor=INK, lw=0, zorder=5)
    ax.add_patch(bar)
    if gate.forward:
        write(ax, x, high + 0.47, gate.name, 9.5, weight="bold")
        write(ax, x, high + 0.30, f"→ {gate.forward}")
        write(ax, x, high + 0.13, f"← {gate.backward}")
    else:
        bar.set(facecolor="white", edgecolor=MUTED, lw=1, ls=(0, (3, 2)))
        write(ax, x, high + 0.30, gate.name, 9.5, MUTED, weight="bold")
        write(ax, x, high + 0.13, "nothing", color=MUTED)


def draw_section(
    ax: Any, y: float, reach: tuple[float, float], title: str, tensors: Sequence[Tensor], s: Scheme
) -> None:
    """One row, centred at y: x, enter, the products, leave, x + y.

    `tensors` are x, then those inside the section (activation, weight, activation, ..., y), then
    x + y. `reach` is how far the section's band goes below and above y.
    """
    low, high = y - reach[0], y + reach[1]
    first, *inside, last = tensors
    enter, leave = 1.62, WIDTH - 1.50
    ax.add_patch(Rectangle((enter, low), leave - enter, high - low, facecolor=BAND, lw=0))
    write(ax, (enter + leave) / 2, high + 0.17, title, 11, weight="bold")
    draw_gate(ax, enter, low, high, s.enter)
    draw_gate(ax, leave, low, high, s.leave)

    draw_tensor(ax, MARGIN, y, first)
    arrow(ax, MARGIN + H + 0.06, y, enter - 0.08, y)
    middle = (MARGIN + H + enter) / 2 - 0.01
    if s.summa:
        norm_sign(ax, middle, y + 0.2)
    else:
        write(ax, middle, y + 0.13, "norm")
    bar = y - TALL / 2 - 0.44
    draw_sheet(ax, MARGIN, bar, H, 0.09, s.norm)
    write(ax, MARGIN + H / 2, bar - 0.19, "norm γ, β")

    x = enter + 0.38
    arrow(ax, enter + 0.07, y, x - 0.06, y)
    for tensor, following in zip(inside, [*inside[1:], None]):
        draw_tensor(ax, x, y, tensor)
        right = x + tensor.width
        gap = 0.52 if following and following.name == "y" else 0.40
        if following is None:
            arrow(ax, right + (0.14 if s.partial else 0.06), y, leave - 0.08, y)
        elif following.name == "o":
            gap = 0.50
            arrow(ax, right + 0.05, y, right + gap - 0.05, y)
            write(ax, right + gap / 2, y + 0.13, "heads")
        elif tensor.name.startswith("W$"):
            write(ax, right + gap / 2, y, "=", 13)
        elif s.summa:
            summa_sign(ax, right + gap / 2, y)
        else:
            write(ax, right + gap / 2, y, "×", 13)
        x = right + gap

    x = WIDTH - MARGIN - H
    arrow(ax, leave + 0.07, y, x - 0.06, y)
    write(ax, (leave + x) / 2, y + 0.13, "+ x", 9)
    draw_tensor(ax, x, y, last)


def draw_devices(ax: Any, x: float, top: float, shape: tuple[int, int], axis: str) -> None:
    """The device grid as the key to the colors, its top right corner at (x, top)."""
    r, c = shape
    side = 0.34 if r == 1 else 0.3
    left, low = x - c * side, top - r * side
    if r * c == 1:
        draw_sheet(ax, left, top, side, side, whole(0))
        write(ax, left - 0.12, top - side / 2, "the device", color=MUTED, ha="right")
        return
    draw_sheet(ax, left, top, c * side, r * side, cut(r, c) if r == 1 else by_place(cut(r, c)))
    arrow(ax, left, top + 0.08, x, top + 0.08, MUTED, 0.9, 6)
    write(ax, (left + x) / 2, top + 0.18, f"axis {axis}", 8, MUTED)
    if r == 1:
        write(ax, left - 0.12, top - side / 2, "devices", color=MUTED, ha="right")
    else:
        arrow(ax, left - 0.08, top, left - 0.08, low, MUTED, 0.9, 6)
        write(ax, left - 0.15, (top + low) / 2, "axis row", 8, MUTED, ha="right")


def draw_key(ax: Any, x: float, y: float, scheme: Scheme) -> None:
    """What the patterns mean, as far as this figure uses them."""
    fill(ax, x, y - 0.08, 0.34, 0.16, (0,))
    write(ax, x + 0.42, y, "held by one device", color=MUTED, ha="left")
    x += 1.92
    if scheme.summa:
        fill(ax, x, y - 0.08, 0.34, 0.16, (0, 2))
        write(ax, x + 0.42, y, "a copy on each device of a column", color=MUTED, ha="left")
        x += 3.02
        summa_sign(ax, x + 0.1, y)
        norm_sign(ax, x + 0.54, y)
        write(ax, x + 0.88, y, "communication", color=MUTED, ha="left")
    else:
        fill(ax, x, y - 0.08, 0.34, 0.16, (0, 1, 2, 3))
        write(ax, x + 0.42, y, "a copy on each device", color=MUTED, ha="left")
        x += 2.17
        for k in range(4):
            shift = 0.035 * (3 - k)
            fill(ax, x + shift, y - 0.12 + shift, 0.28, 0.12, (k,), z=3 + 0.3 * k)
        write(ax, x + 0.48, y, "partial sums", color=MUTED, ha="left")
        x += 1.56
        ax.add_patch(Rectangle((x, y - 0.08), 0.1, 0.16, facecolor=INK, lw=0, zorder=3))
        write(ax, x + 0.18, y, "communication, → forward, ← backward", color=MUTED, ha="left")


def draw_scheme(s: Scheme, extra: float = 0.0) -> Any:
    """The whole figure; returns the axes, the lowest `extra` inches left empty."""
    alone = s.grid == (1, 1)  # then there is no key to draw
    height = (7.55 if alone else 7.85) + extra
    ax = new_figure(height)
    write(ax, MARGIN, height - 0.34, s.title, 15, weight="bold", ha="left")
    write(ax, MARGIN, height - 0.63, s.subtitle, 9.5, MUTED, ha="left")
    draw_devices(ax, WIDTH - MARGIN, height - 0.33, s.grid, s.axis)
    if not alone:
        draw_key(ax, MARGIN, height - 0.96, s)

    def act(name: str, key: str, sheets: Act, times: int = 1, last: str = "h") -> Tensor:
        n_heads, pile = 8 if name == "QKV" else 0, s.partial and name == "y"
        words = s.local.get(key, "")
        return Tensor(name, f"[b, s, {last}]", sheets, times * H, S, words, n_heads, pile)

    def weight(key: str, shape: str, sheet: Sheet, bias: Sheet, w: int, h: int) -> Tensor:
        name, words = rf"W$_\mathbf{{{key}}}$", s.local.get(key, "")
        bias_words = s.local[f"{key} bias"]
        return Tensor(name, shape, [sheet], w * H, h * H, words, bias=bias, bias_local=bias_words)

    before, after = act("x", "x", s.between), act("x + y", "x", s.between)
    entered, closed = act("x\u0302", "entered", s.entered), act("y", "y", s.closed)
    attention = (
        before,
        entered,
        weight("qkv", "[h, 3h]", s.opening, s.opening_bias, 3, 1),
        act("QKV", "QKV", s.inside, 3, "3h"),
        act("o", "o", s.inside),
        weight("out", "[h, h]", s.closing, s.closing_bias, 1, 1),
        closed,
        after,
    )
    feed_forward = (
        before,
        entered,
        weight("up", "[h, f]", s.opening, s.opening_bias, 4, 1),
        act("GELU(·)", "f", s.inside, 4, "f"),
        weight("down", "[f, h]", s.closing, s.closing_bias, 1, 4),
        closed,
        after,
    )
    draw_section(ax, extra + 5.02, (1.02, 1.10), "Attention", attention, s)
    draw_section(ax, extra + 1.98, (1.50, 1.39), "Feed-forward", feed_forward, s)
    write(ax, WIDTH / 2, extra + 0.22, s.moved, 9.5)
    return ax
