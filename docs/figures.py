"""Draws the figures of docs/concepts.md: `python docs/figures.py` writes docs/figures/*.svg.

One function a figure, one figure a scheme, all on the same block diagram: a transformer layer as
two rows, attention and feed-forward, each from `enter` to `leave`. The picture language:

- a colour is a device; a block in that colour is held there and nowhere else;
- stripes are copies: every device whose colour occurs holds the whole block;
- a pile of sheets is a set of partial sums, one a device, still to be added up;
- anything near black is communication; a dashed outline is a place where none happens.

Lengths are inches, y grows upwards. The output is the same on every run and machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle

FILLS = ("#8EBBE8", "#F5B56E", "#94CF98", "#D9A3D6")  # devices 0 to 3
INK, MUTED, EDGE, BAND = "#1F2733", "#667085", "#39424E", "#F1F3F6"

H = 0.48  # drawn width of h; f is 4 of them
S = 0.58  # drawn height of one sequence's s tokens
B = 2  # sequences drawn
GAP = 0.06  # between two sequences
TALL = B * S + (B - 1) * GAP  # drawn height of an activation
WIDTH = 11.0
TILE = 0.97  # side of a device in the picture of a SUMMA step


@dataclass(frozen=True)
class Block:
    """A rectangle of a tensor, in fractions of it from its top left, and the devices holding it."""

    x: float
    y: float
    w: float
    h: float
    holders: tuple[int, ...]
    label: str = ""


@dataclass(frozen=True)
class Tensor:
    """A drawn tensor: its blocks, its size in inches, and the words above and below it."""

    name: str
    shape: str
    local: str
    blocks: Sequence[Block]
    width: float
    height: float
    rules: int = 0  # thin separators along the width, one a head
    pile: bool = False  # partial sums: `blocks` is then one sheet a device
    bias: Sequence[Block] = ()
    bias_local: str = ""

    @property
    def by_sequence(self) -> bool:
        return self.height == TALL


@dataclass(frozen=True)
class Gate:
    """What happens at an end of a section; no words mean nothing does."""

    name: str
    forward: str = ""
    backward: str = ""


@dataclass(frozen=True)
class Scheme:
    """All that differs between the four figures."""

    title: str
    subtitle: str
    grid: tuple[int, int]
    enter: Gate
    leave: Gate
    between: Callable[[], list[Block]]  # activations between sections
    entered: Callable[[], list[Block]]  # after `enter`
    inside: Callable[[], list[Block]]  # between the opening and the closing product
    opening: Callable[[], list[Block]]  # weight of the opening product
    closing: Callable[[], list[Block]]
    opening_bias: Callable[[], list[Block]]
    closing_bias: Callable[[], list[Block]]
    norm: Callable[[], list[Block]]
    partial: bool = False  # the closing product gives partial sums
    summa: bool = False
    local: dict[str, str] = field(default_factory=dict)
    moved: str = ""
    extra: float = 0.0  # height kept free at the bottom


# ----------------------------------------------------------------- ways to cut a tensor


def whole(devices: int = 1) -> list[Block]:
    """One block, on every device."""
    return [Block(0, 0, 1, 1, tuple(range(devices)))]


def columns(devices: int) -> list[Block]:
    """Cut along the last dimension."""
    w = 1 / devices
    return [Block(k * w, 0, w, 1, (k,), str(k)) for k in range(devices)]


def rows(devices: int) -> list[Block]:
    """Cut along the first dimension."""
    h = 1 / devices
    return [Block(0, k * h, 1, h, (k,), str(k)) for k in range(devices)]


def tokens(devices: int) -> list[Block]:
    """An activation cut over s: each sequence in as many pieces as there are devices."""
    h = S / TALL / devices
    starts = [n * (S + GAP) / TALL for n in range(B)]
    return [Block(0, y + k * h, 1, h, (k,), str(k)) for y in starts for k in range(devices)]


def sequences(blocks: Sequence[Block]) -> list[Block]:
    """The same cut, drawn for every sequence on its own (the gap between them left free)."""
    part = S / TALL
    starts = [n * (S + GAP) / TALL for n in range(B)]
    return [
        Block(k.x, y + k.y * part, k.w, k.h * part, k.holders, k.label)
        for y in starts
        for k in blocks
    ]


def grid(r: int, c: int) -> list[Block]:
    """Cut both ways."""
    return [
        Block(j / c, i / r, 1 / c, 1 / r, (i * c + j,), f"{i},{j}")
        for i in range(r)
        for j in range(c)
    ]


def grid_sequences(r: int, c: int) -> list[Block]:
    """An activation cut both ways: whole sequences over the rows, h over the columns."""
    h, step = S / TALL, (S + GAP) / TALL
    return [
        Block(j / c, i * step, 1 / c, h, (i * c + j,), f"{i},{j}")
        for i in range(r)
        for j in range(c)
    ]


def grid_vector(r: int, c: int) -> list[Block]:
    """A vector cut over the columns; every device of a column holds a copy."""
    return [Block(j / c, 0, 1 / c, 1, tuple(i * c + j for i in range(r))) for j in range(c)]


# ----------------------------------------------------------------- strokes


def new_figure(height: float) -> Any:
    figure = plt.figure(figsize=(WIDTH, height), facecolor="white")
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(0, height))
    ax.axis("off")
    return ax


def write(
    ax: Any,
    x: float,
    y: float,
    text: str,
    size: float = 9.0,
    color: str = INK,
    weight: str = "normal",
    ha: str = "center",
    va: str = "center",
) -> None:
    ax.text(x, y, text, fontsize=size, color=color, fontweight=weight, ha=ha, va=va, zorder=9)


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
    """A rectangle, its bottom left at (x, y), in its holder's colour or striped in all of them."""
    ax.add_patch(Rectangle((x, y), w, h, facecolor=FILLS[holders[0]], lw=0, zorder=z))
    if len(holders) > 1:
        band = 0.085
        k, t = 0, 0.0
        while t < w + h:
            corners = stripe(x, y, w, h, t, t + band)
            fill_color = FILLS[holders[k % len(holders)]]
            ax.add_patch(Polygon(corners, facecolor=fill_color, lw=0, zorder=z + 0.1))
            k, t = k + 1, t + band
    ax.add_patch(Rectangle((x, y), w, h, facecolor="none", edgecolor=EDGE, lw=lw, zorder=z + 0.2))


def stripe(
    x: float, y: float, w: float, h: float, t0: float, t1: float
) -> list[tuple[float, float]]:
    """The part of a rectangle where t0 <= dx + dy <= t1."""

    def cut(
        corners: list[tuple[float, float]], inside: Callable[[float], float]
    ) -> list[tuple[float, float]]:
        kept: list[tuple[float, float]] = []
        for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1]):
            a, b = inside(ax - x + ay - y), inside(bx - x + by - y)
            if a >= 0:
                kept.append((ax, ay))
            if a * b < 0:
                k = a / (a - b)
                kept.append((ax + k * (bx - ax), ay + k * (by - ay)))
        return kept

    corners = [(x, y), (x + w, y), (x + w, y + h), (x, y + h)]
    return cut(cut(corners, lambda t: t - t0), lambda t: t1 - t)


def arrow(
    ax: Any,
    start: tuple[float, float],
    end: tuple[float, float],
    color: str = INK,
    lw: float = 1.1,
    head: float = 7,
) -> None:
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=head,
            color=color,
            lw=lw,
            shrinkA=0,
            shrinkB=0,
            zorder=6,
        )
    )


def pill(ax: Any, x: float, y: float, text: str, w: float, h: float = 0.2) -> None:
    """White words on near black: communication."""
    box = FancyBboxPatch(
        (x - w / 2, y - h / 2),
        w,
        h,
        boxstyle=f"round,pad=0,rounding_size={h / 2}",
        facecolor=INK,
        lw=0,
        zorder=7,
    )
    ax.add_patch(box)
    write(ax, x, y - 0.005, text, 7.5, "white", "bold")


def summa_sign(ax: Any, x: float, y: float) -> None:
    """A product that communicates."""
    ax.add_patch(Circle((x, y), 0.125, facecolor=INK, lw=0, zorder=7))
    write(ax, x, y - 0.012, "\u00d7", 13, "white", "bold")


# ----------------------------------------------------------------- parts of the diagram


def draw_blocks(
    ax: Any, x: float, top: float, w: float, h: float, blocks: Sequence[Block], size: float = 7.0
) -> None:
    for k in blocks:
        fill(ax, x + k.x * w, top - (k.y + k.h) * h, k.w * w, k.h * h, k.holders)
        if k.label:
            small = 6.5 if k.w * w < 0.28 else size
            write(ax, x + (k.x + k.w / 2) * w, top - (k.y + k.h / 2) * h - 0.008, k.label, small)


def draw_tensor(ax: Any, x: float, y: float, t: Tensor) -> None:
    """A tensor with its left edge at x, centred at height y, with its words."""
    top, middle = y + t.height / 2, x + t.width / 2
    if t.pile:
        step = 0.045
        sheets = len(t.blocks)
        for k, block in enumerate(t.blocks):
            shift = (sheets - 1 - k - (sheets - 1) / 2) * step
            for n in range(B):
                bottom = top - n * (S + GAP) - S + shift
                fill(ax, x + shift, bottom, t.width, S, block.holders, z=3 + 0.3 * k)
                if k == sheets - 1:
                    write(ax, middle + shift, bottom + S / 2, "\u03a3", 11)
    else:
        draw_blocks(ax, x, top, t.width, t.height, t.blocks)
    for k in range(1, t.rules):
        line = x + k * t.width / t.rules
        for n in range(B):
            high = top - n * (S + GAP)
            ax.plot([line, line], [high, high - S], color=EDGE, lw=0.35, alpha=0.55, zorder=4)
    lift = 0.07 if t.pile else 0.0
    write(ax, middle, top + 0.30 + lift, t.name, 9.5, weight="bold")
    write(ax, middle, top + 0.12 + lift, t.shape, 8.5, MUTED)
    low = top - t.height - lift
    if t.bias:
        draw_blocks(ax, x, low - 0.05, t.width, 0.09, t.bias)
        low -= 0.14
    words = [t.local, f"bias {t.bias_local}" if t.bias_local else ""]
    for word in filter(None, words):
        low -= 0.14
        write(ax, middle, low, word, 8.5)
        low -= 0.03


def draw_gate(ax: Any, x: float, low: float, high: float, gate: Gate) -> None:
    """An end of a section: a bar from low to high, with what it does above it."""
    busy = bool(gate.forward or gate.backward)
    style: dict[str, Any] = (
        {"facecolor": INK, "lw": 0}
        if busy
        else {"facecolor": "white", "edgecolor": MUTED, "lw": 1, "ls": (0, (3, 2))}
    )
    ax.add_patch(Rectangle((x - 0.05, low), 0.1, high - low, zorder=5, **style))
    if not busy:
        write(ax, x, high + 0.30, gate.name, 9.5, MUTED, "bold")
        write(ax, x, high + 0.13, "nothing", 8.5, MUTED)
        return
    write(ax, x, high + 0.47, gate.name, 9.5, weight="bold")
    write(ax, x, high + 0.30, f"\u2192 {gate.forward}", 8.5)
    write(ax, x, high + 0.13, f"\u2190 {gate.backward}", 8.5)


def draw_devices(ax: Any, x: float, top: float, shape: tuple[int, int]) -> None:
    """The device grid, as the key to the colours, its top right corner at (x, top)."""
    r, c = shape
    side = 0.34 if r == 1 else 0.3
    left = x - c * side
    if r * c == 1:
        fill(ax, left, top - side, side, side, (0,))
        write(ax, left - 0.12, top - side / 2, "the device", 8.5, MUTED, ha="right")
        return
    for i in range(r):
        for j in range(c):
            fill(ax, left + j * side, top - (i + 1) * side, side, side, (i * c + j,))
            label = str(j) if r == 1 else f"{i},{j}"
            x_mid, y_mid = left + (j + 0.5) * side, top - (i + 0.5) * side
            write(ax, x_mid, y_mid - 0.008, label, 8 if r == 1 else 7)
    arrow(ax, (left, top + 0.08), (x, top + 0.08), MUTED, 0.9, 6)
    write(ax, (left + x) / 2, top + 0.18, "axis col", 8, MUTED)
    if r > 1:
        arrow(ax, (left - 0.08, top), (left - 0.08, top - r * side), MUTED, 0.9, 6)
        write(ax, left - 0.15, top - r * side / 2, "axis row", 8, MUTED, ha="right")
    else:
        write(ax, left - 0.12, top - side / 2, "devices", 8.5, MUTED, ha="right")


def draw_key(ax: Any, x: float, y: float, scheme: Scheme) -> None:
    """What the patterns mean, as far as this figure uses them."""
    r, c = scheme.grid
    if r * c == 1:
        return
    everyone = tuple(range(r * c)) if r == 1 else (0, 2)
    entries = [((0,), "held by one device")]
    entries.append((everyone, "a copy on each device" if r == 1 else "a copy on each of a column"))
    for holders, text in entries:
        fill(ax, x, y - 0.08, 0.34, 0.16, holders)
        write(ax, x + 0.42, y, text, 8.5, MUTED, ha="left")
        x += 0.42 + 0.073 * len(text) + 0.22
    if scheme.partial:
        for k in range(4):
            shift = 0.035 * (3 - k)
            fill(ax, x + shift, y - 0.12 + shift, 0.28, 0.12, (k,), z=3 + 0.3 * k)
        write(ax, x + 0.48, y, "partial sums", 8.5, MUTED, ha="left")
        x += 0.42 + 0.073 * 12 + 0.26
    ax.add_patch(Rectangle((x, y - 0.08), 0.1, 0.16, facecolor=INK, lw=0, zorder=3))
    words = "communication" if scheme.summa else "communication, \u2192 forward, \u2190 backward"
    write(ax, x + 0.18, y, words, 8.5, MUTED, ha="left")


def draw_section(
    ax: Any, y: float, reach: tuple[float, float], title: str, tensors: Sequence[Tensor], s: Scheme
) -> None:
    """One row: x, enter, the products, leave, x; centred at y, its band from y-below to y+above.

    `tensors` are x, then those inside the section (activation, weight, activation, ..., y), then x.
    """
    below, above = reach
    low, high = y - below, y + above
    first, *inside, last = tensors
    enter_x, leave_x = 1.62, WIDTH - 1.50

    ax.add_patch(Rectangle((enter_x, low), leave_x - enter_x, high - low, facecolor=BAND, lw=0))
    write(ax, (enter_x + leave_x) / 2, high + 0.17, title, 11, weight="bold")
    draw_gate(ax, enter_x, low, high, s.enter)
    draw_gate(ax, leave_x, low, high, s.leave)

    # Before the section: x, through the norm, to the gate.
    x = 0.35
    draw_tensor(ax, x, y, first)
    arrow(ax, (x + H + 0.06, y), (enter_x - 0.08, y))
    middle = (x + H + enter_x) / 2 - 0.01
    if s.summa:
        pill(ax, middle, y + 0.2, "norm", 0.48)
    else:
        write(ax, middle, y + 0.13, "norm", 8.5)
    bar = y - TALL / 2 - 0.44
    draw_blocks(ax, x, bar, H, 0.09, s.norm())
    write(ax, x + H / 2, bar - 0.19, "norm \u03b3, \u03b2", 8.5)

    # Inside: operators between tensors.
    x = enter_x + 0.38
    arrow(ax, (enter_x + 0.07, y), (x - 0.06, y))
    for k, tensor in enumerate(inside):
        draw_tensor(ax, x, y, tensor)
        right = x + tensor.width
        if k == len(inside) - 1:
            arrow(ax, (right + (0.14 if s.partial else 0.06), y), (leave_x - 0.08, y))
            break
        following = inside[k + 1]
        if tensor.name == "QKV":
            gap = 0.50
            arrow(ax, (right + 0.05, y), (right + gap - 0.05, y))
            write(ax, right + gap / 2, y + 0.13, "heads", 8.5)
        elif following.name.startswith("W$"):
            gap = 0.40
            if s.summa:
                summa_sign(ax, right + gap / 2, y)
            else:
                write(ax, right + gap / 2, y, "\u00d7", 13)
        else:
            gap = 0.40 if k < 3 else 0.52
            write(ax, right + gap / 2, y, "=", 13)
        x = right + gap

    # After the section: the residual is added.
    x = WIDTH - 0.35 - H
    arrow(ax, (leave_x + 0.07, y), (x - 0.06, y))
    write(ax, (leave_x + x) / 2, y + 0.13, "+ x", 9)
    draw_tensor(ax, x, y, last)


def draw_scheme(scheme: Scheme) -> Any:
    """The whole figure; returns the axes, its lowest `extra` inches empty."""
    height = 7.85 + scheme.extra
    ax = new_figure(height)
    lift = scheme.extra
    write(ax, 0.35, height - 0.34, scheme.title, 15, weight="bold", ha="left")
    write(ax, 0.35, height - 0.63, scheme.subtitle, 9.5, MUTED, ha="left")
    draw_devices(ax, WIDTH - 0.35, height - 0.33, scheme.grid)
    draw_key(ax, 0.35, height - 0.96, scheme)

    def at(name: str) -> str:
        return scheme.local.get(name, "")

    def act(name: str, shape: str, blocks: list[Block], times: int = 1, **more: Any) -> Tensor:
        return Tensor(name, shape, at(more.pop("key", "x")), blocks, times * H, TALL, **more)

    before = act("x", "[b, s, h]", scheme.between())
    after = act("x + y", "[b, s, h]", scheme.between())
    entered = act("x\u0302", "[b, s, h]", scheme.entered(), key="entered")
    y_blocks = rows(4) if scheme.partial else scheme.between()
    result = act("y", "[b, s, h]", y_blocks, key="y", pile=scheme.partial)

    def opening(name: str, shape: str, key: str, times: int) -> Tensor:
        blocks, bias = scheme.opening(), scheme.opening_bias()
        words = at(key), times * H, H
        return Tensor(name, shape, words[0], blocks, *words[1:], 0, False, bias, at(f"{key} bias"))

    def closing(name: str, shape: str, key: str, times: int) -> Tensor:
        blocks, bias = scheme.closing(), scheme.closing_bias()
        words = at(key), H, times * H
        return Tensor(name, shape, words[0], blocks, *words[1:], 0, False, bias, at(f"{key} bias"))

    attention = [
        before,
        entered,
        opening("W$_\\mathbf{qkv}$", "[h, 3h]", "qkv", 3),
        act("QKV", "[b, s, 3h]", scheme.inside(), 3, key="QKV", rules=8),
        act("o", "[b, s, h]", scheme.inside(), 1, key="o"),
        closing("W$_\\mathbf{out}$", "[h, h]", "out", 1),
        result,
        after,
    ]
    feed_forward = [
        before,
        entered,
        opening("W$_\\mathbf{up}$", "[h, f]", "up", 4),
        act("GELU(\u00b7)", "[b, s, f]", scheme.inside(), 4, key="f"),
        closing("W$_\\mathbf{down}$", "[f, h]", "down", 4),
        result,
        after,
    ]
    draw_section(ax, lift + 5.02, (1.02, 1.10), "Attention", attention, scheme)
    draw_section(ax, lift + 1.98, (1.50, 1.39), "Feed-forward", feed_forward, scheme)
    if scheme.moved:
        write(ax, WIDTH / 2, lift + 0.22, scheme.moved, 9.5)
    return ax


# ----------------------------------------------------------------- the four figures


def single() -> Any:
    """One device: the layer that the other schemes cut."""
    return draw_scheme(
        Scheme(
            title="Single device",
            subtitle="One layer. Tokens run downwards (two sequences drawn), "
            "h runs to the right; thin lines are heads.",
            grid=(1, 1),
            enter=Gate("enter"),
            leave=Gate("leave"),
            between=lambda: sequences(whole()),
            entered=lambda: sequences(whole()),
            inside=lambda: sequences(whole()),
            opening=whole,
            closing=whole,
            opening_bias=whole,
            closing_bias=whole,
            norm=whole,
            local={k: v for k, v in _WHOLE.items() if k.endswith("bias")},
            moved="Nothing is cut, nothing is moved.",
        )
    )


def megatron() -> Any:
    """One-dimensional tensor parallelism on a 1 x 4 grid."""
    return draw_scheme(
        Scheme(
            title="Megatron, 1-D",
            subtitle="A grid of 1 \u00d7 c devices, c = 4. "
            "Above a tensor: all of it. Below: what one device holds.",
            grid=(1, 4),
            enter=Gate("enter", "identity", "all-reduce"),
            leave=Gate("leave", "all-reduce", "identity"),
            between=lambda: sequences(whole(4)),
            entered=lambda: sequences(whole(4)),
            inside=lambda: sequences(columns(4)),
            opening=lambda: columns(4),
            closing=lambda: rows(4),
            opening_bias=lambda: [Block(k.x, 0, k.w, 1, k.holders) for k in columns(4)],
            closing_bias=whole,
            norm=lambda: whole(4),
            partial=True,
            local=_ONE_D,
            moved="A device receives 4(c\u22121)/c \u00b7 bsh elements a layer in the forward pass.",
        )
    )


def megatron_sequence() -> Any:
    """The sequence-parallel form on a 1 x 4 grid."""
    return draw_scheme(
        Scheme(
            title="Megatron, sequence parallel",
            subtitle="A grid of 1 \u00d7 c devices, c = 4. "
            "Above a tensor: all of it. Below: what one device holds.",
            grid=(1, 4),
            enter=Gate("enter", "all-gather s", "reduce-scatter s"),
            leave=Gate("leave", "reduce-scatter s", "all-gather s"),
            between=lambda: tokens(4),
            entered=lambda: sequences(whole(4)),
            inside=lambda: sequences(columns(4)),
            opening=lambda: columns(4),
            closing=lambda: rows(4),
            opening_bias=lambda: [Block(k.x, 0, k.w, 1, k.holders) for k in columns(4)],
            closing_bias=whole,
            norm=lambda: whole(4),
            partial=True,
            local={**_ONE_D, "x": "[b, s/c, h]"},
            moved="A device receives 4(c\u22121)/c \u00b7 bsh elements a layer in the forward pass.",
        )
    )


def optimus() -> Any:
    """Two-dimensional tensor parallelism on a 2 x 2 grid, and one SUMMA step."""
    scheme = Scheme(
        title="Optimus, 2-D",
        subtitle="A grid of r \u00d7 c devices, r = c = 2. "
        "Above a tensor: all of it. Below: what one device holds.",
        grid=(2, 2),
        enter=Gate("enter"),
        leave=Gate("leave"),
        between=lambda: grid_sequences(2, 2),
        entered=lambda: grid_sequences(2, 2),
        inside=lambda: grid_sequences(2, 2),
        opening=lambda: grid(2, 2),
        closing=lambda: grid(2, 2),
        opening_bias=lambda: grid_vector(2, 2),
        closing_bias=lambda: grid_vector(2, 2),
        norm=lambda: grid_vector(2, 2),
        summa=True,
        local=_TWO_D,
        moved="A device receives (c\u22121)/(rc) \u00b7 7bsh + (r\u22121)/(rc) \u00b7 12h\u00b2 "
        "elements a layer in the forward pass, products only.",
        extra=3.5,
    )
    ax = draw_scheme(scheme)
    draw_summa_step(ax, 3.06)
    return ax


def draw_summa_step(ax: Any, top: float) -> None:
    """Step l = 0 of C = A B on a 2 x 2 grid: two broadcasts, then every device multiplies."""
    ax.plot([0.35, WIDTH - 0.35], [top + 0.32, top + 0.32], color="#C9CFD8", lw=0.8)
    summa_sign(ax, 0.48, top)
    title = "One SUMMA step, l = 0, of C = A \u00b7 B"
    write(ax, 0.72, top, title, 11, weight="bold", ha="left")
    heads = (
        "1  A(i, l) travels along row i",
        "2  B(l, j) travels down column j",
        "3  C(i, j) += A(i, l) \u00b7 B(l, j)",
    )
    space, high = 0.36, top - 0.66
    for panel, (left, head) in enumerate(zip((0.35, 2.95, 5.55), heads)):
        write(ax, left + TILE + space / 2, high + 0.22, head, 9.5, weight="bold")
        for i in range(2):
            for j in range(2):
                x = left + j * (TILE + space)
                y = high - TILE - i * (TILE + space)
                draw_tile(ax, x, y, i, j)
                low, middle = y + 0.14, x + TILE / 2
                if panel == 0:
                    draw_panel(ax, middle, low, f"A{i}0", 2 * i, owner=j == 0)
                elif panel == 1:
                    draw_panel(ax, middle, low, f"B0{j}", j, owner=i == 0)
                else:
                    write(ax, middle, low + 0.48, f"C{i}{j} +=", 8.5)
                    draw_panel(ax, middle - 0.21, low, f"A{i}0", 2 * i)
                    write(ax, middle, low + 0.15, "\u00b7", 13, weight="bold")
                    draw_panel(ax, middle + 0.21, low, f"B0{j}", j)
        for k in range(2):
            along = k * (TILE + space) + TILE / 2
            if panel == 0:
                begin, y = left + TILE + 0.03, high - along
                arrow(ax, (begin, y), (begin + space - 0.06, y), lw=2, head=12)
            elif panel == 1:
                begin, x = high - TILE - 0.03, left + along
                arrow(ax, (x, begin), (x, begin - space + 0.06), lw=2, head=12)
    words = (
        "A, B and C stay where they are;",
        "copies of the step\u2019s panels travel.",
        "Step l = 1: the same from column 1",
        "of A and row 1 of B. Then C is whole.",
        "",
        "Backward, in the same steps:",
        "dA = dC \u00b7 B\u1d40, sums along rows;",
        "dB = A\u1d40 \u00b7 dC, sums down columns.",
    )
    for k, line in enumerate(words):
        write(ax, 8.17, high - 0.18 - 0.235 * k, line, 9, ha="left")


def draw_tile(ax: Any, x: float, y: float, i: int, j: int) -> None:
    """Device (i, j), its bottom left at (x, y)."""
    fill(ax, x, y, TILE, TILE, (2 * i + j,), lw=1.0)
    inner = TILE - 0.10, TILE - 0.26
    ax.add_patch(Rectangle((x + 0.05, y + 0.05), *inner, facecolor="white", lw=0, zorder=4))
    write(ax, x + TILE / 2, y + TILE - 0.115, f"{i},{j}", 8)


def draw_panel(
    ax: Any, x: float, y: float, text: str, device: int, owner: bool = False
) -> None:
    """A block inside a device's tile, in the colour of where it lives; bold if it lives here."""
    fill(ax, x - 0.15, y, 0.3, 0.3, (device,), lw=2.2 if owner else 0.8, z=5)
    write(ax, x, y + 0.142, text, 8)


_WHOLE = {
    "qkv bias": "[3h]",
    "out bias": "[h]",
    "up bias": "[f]",
    "down bias": "[h]",
}
_ONE_D = {
    "x": "[b, s, h]",
    "entered": "[b, s, h]",
    "y": "[b, s, h]",
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
}
_TWO_D = {
    "x": "[b/r, s, h/c]",
    "entered": "[b/r, s, h/c]",
    "y": "[b/r, s, h/c]",
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
}

FIGURES: dict[str, Callable[[], Any]] = {
    "single": single,
    "megatron": megatron,
    "megatron-sequence": megatron_sequence,
    "optimus": optimus,
}


def main(folder: Path, suffix: str = "svg") -> None:
    """Draw every figure into folder as FIGURE.suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    style = {
        "font.family": "DejaVu Sans",  # shipped with matplotlib
        "svg.fonttype": "path",
        "svg.hashsalt": "gridformer",
    }
    with plt.rc_context(style):
        for name, draw in FIGURES.items():
            figure = draw().figure
            metadata = {"Date": None, "Creator": None} if suffix == "svg" else {}
            figure.savefig(folder / f"{name}.{suffix}", metadata=metadata, dpi=110)
            plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "figures", *sys.argv[2:3])
