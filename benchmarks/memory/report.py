"""Tables and a picture of what benchmarks.memory found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.memory.cases import METHODS, SCALINGS, schemes
from gridformer.utils.units import GIB

Found = Sequence[dict[str, Any]]

HEAD = """# Memory

{machines}

Bytes are those of tensors: parameters, gradients, AdamW's moments, activations, workspace and
messages, of the process that holds most, at the moment when it holds most. **Estimated** is what
`gridformer memory` says: the code of one rank, run on tensors without memory in a process group
that sends nothing. **Measured** is what torch's allocator gave out in real processes over gloo, of
four steps the least: a thread of gloo holds what was sent a moment longer than needed, by chance,
and still does where all of Megatron's processes share two cores.

![The largest batch by processes](memory.png)
"""

LIMITS = """## The largest batch that fits, {title}

GPT-2's blocks with embedding, head and loss, float32, AdamW, `recompute: full`. In brackets the
batch over that of megatron without sequence parallelism; where a cell is empty, the layout does
not divide the model. Batches are found by estimating.
"""

AGREE = """Estimated and measured, with the largest batch that fits, and with the next larger one:
"""

SHARES = """## What a process holds, times processes, over what one device holds

The same model and batch (4 sequences a process); 1.00 would be a perfect cut of everything,
workspace and messages included. Estimated.
"""

PRICE = """## What each method costs

A step of 4 layers, h = 512, s = 128, v = 8192, attention dropout 0.1, b = 16, float32. **Time** is
that of the step over the first row's, the median of the ratios within rounds; **arithmetic** is the
same of floating-point operations in products, counted as they are run. All methods' models take
turns on the same processes, on 2 cores.
"""


def report(found: Found) -> str:
    """Markdown of everything that was found."""
    machines = sorted({_machine(one["machine"]) for one in found})
    parts = [HEAD.format(machines="\n".join(machines))]
    for name, scaling in SCALINGS.items():
        limits = {
            (processes, title): one["found"]
            for one in found
            if one["case"][:2] == ["limit", name]
            for processes, title in [one["case"][2:]]
        }
        if limits:
            parts.append(LIMITS.format(title=scaling.title))
            parts.append(_limits(limits))
            if any(one["measured"] for one in limits.values()):
                parts.append(AGREE)
                parts.append(_agreement(limits))
    shares = [one for one in found if one["case"][0] == "share"]
    if shares:
        parts += [SHARES, _shares(shares)]
    prices = [one for one in found if one["case"][0] == "price"]
    if prices:
        parts += [PRICE, *(_prices(one) for one in prices)]
    return "\n".join(parts)


def _limits(limits: dict[tuple[int, str], dict[str, Any]]) -> str:
    processes = sorted({number for number, _ in limits})
    titles = list(dict.fromkeys(title for number in processes for title in schemes(number)))
    rows = []
    for title in titles:
        cells = []
        for number in processes:
            one = limits.get((number, title))
            if one is None:
                cells.append("")
                continue
            than = limits.get((number, "megatron"))
            times = ""
            if than and than["batch"] and title != "megatron":
                times = f" ({one['batch'] / than['batch']:.1f}x)"
            cells.append(f"{one['batch']}{times}" if one["batch"] else "none")
        rows.append([title, *cells])
    return _table(["largest batch", *(f"p = {number}" for number in processes)], rows)


def _agreement(limits: dict[tuple[int, str], dict[str, Any]]) -> str:
    rows = []
    for (number, title), one in limits.items():
        if one["measured"]:
            rows.append(
                [
                    f"{title}, p = {number}",
                    str(one["batch"]),
                    f"{one['peak'] / 1e6:.2f}",
                    f"{one['measured'] / 1e6:.2f}",
                    f"{one['peak'] / one['measured'] - 1:+.1%}",
                    f"{one['more'] / 1e6:.2f}",
                    f"{one['measured_more'] / 1e6:.2f}",
                ]
            )
    names = ["", "batch", "estimated, MB", "measured, MB", "", "next: estimated", "measured"]
    return _table(names, rows)


def _shares(found: Found) -> str:
    titles = list(dict.fromkeys(title for one in found for title in one["found"]))
    columns = {
        f"{SCALINGS[name].model(p).name}, p = {p}, recompute: {how}": one["found"]
        for one in found
        for _, name, p, how in [one["case"]]
    }
    rows = [
        [title, *(f"{shares[title]:.2f}" if title in shares else "" for shares in columns.values())]
        for title in titles
    ]
    return _table(["", *columns], rows)


def _prices(one: dict[str, Any]) -> str:
    by_method = {line["method"]: line for line in one["found"]}
    first = by_method[next(iter(METHODS))]
    rows = []
    for method, line in by_method.items():
        ratio = median(a / b for a, b in zip(line["seconds"], first["seconds"]))
        flops = line["flops"] / first["flops"]
        rows.append(
            [
                f"`{method}`",
                f"{1e3 * median(line['seconds']):.0f}",
                f"{ratio:.2f}",
                f"{flops:.2f}",
                f"{ratio / flops:.2f}",
            ]
        )
    title = f"{one['case'][1]}, {len(first['seconds'])} rounds"
    return _table([title, "ms", "time", "arithmetic", "time / arithmetic"], rows)


def plot(found: Found, path: Path) -> None:
    """Largest batch by processes, one panel a scaling."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [n for n in SCALINGS if any(one["case"][:2] == ["limit", n] for one in found)]
    figure, panels = plt.subplots(
        1, len(names), figsize=(6.2 * len(names), 4.4), layout="constrained", squeeze=False
    )
    for axes, name in zip(panels[0], names):
        lines: dict[str, list[tuple[int, int, bool]]] = {}
        for one in found:
            if one["case"][:2] == ["limit", name]:
                _, _, number, title = one["case"]
                real = one["found"]["measured"] is not None
                lines.setdefault(title, []).append((number, one["found"]["batch"], real))
        for title, points in lines.items():
            fitting = sorted(point for point in points if point[1])
            if fitting:
                (line,) = axes.plot(
                    [p for p, _, _ in fitting], [b for _, b, _ in fitting], marker="o", label=title
                )
                squares = [(p, b) for p, b, measured in fitting if measured]
                if squares:
                    axes.plot(*zip(*squares), "s", color=line.get_color(), markersize=9, alpha=0.5)
        budget = SCALINGS[name].budget
        room = f"{budget / 1e9:.0f} GB" if budget > GIB else f"{budget / 1e6:.0f} MB"
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="processes p (h grows with the root of p)",
            ylabel="largest batch",
            title=f"{name}: {room} a process" + (", squares measured" if name == "small" else ""),
        )
        axes.set_xticks([1, 4, 9, 16, 64], ["1", "4", "9", "16", "64"])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _machine(machine: dict[str, str]) -> str:
    return (
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"{machine['date']}, commit {machine['commit']}: `{machine['command']}`."
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
