"""Tables and a picture of the results of benchmarks.memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.memory.cases import HYBRID, METHODS, PROCESSES, SCALINGS, columns, family, schemes
from gridformer.utils.units import GIB

Found = Sequence[dict[str, Any]]

HEAD = """# Memory

{machines}

Bytes are those of tensors (parameters, gradients, AdamW's moments, activations, workspace and
messages) at the peak of the process that holds the most. **Estimated** is what `gridformer memory`
prints: it runs the code of one rank on tensors without memory, in a process group that sends
nothing. **Measured** is what torch's allocator handed out in real processes over gloo, in the step
with the lowest peak out of four. The lowest counts because gloo's threads may by chance hold what
was sent a moment longer than needed; where all of Megatron's processes share two cores, even the
lowest peak contains some of this.

![The largest batch by processes](memory.png)
"""

LIMITS = """## The largest batch that fits, {title}

The model is GPT-2 with embedding, head and loss, in float32 with AdamW and `recompute: full`.
Brackets hold the batch divided by that of megatron without sequence parallelism. A cell is empty if
the layout does not divide the model. Batches are found by estimating. For Megatron on c columns
times p/c replicas under FSDP, the table has the c with the largest batch.
"""

EQUAL = """## What a process holds of the same global batch: {name}

Estimated GB of the fullest process, with the largest batch that fits under Optimus, or the nearest
smaller one that suits the layout (in brackets if it differs). For Megatron on c columns times p/c
replicas under FSDP, the first table has the c that holds the least and the second one every c.
"""

AGREE = """Estimated and measured peaks of the largest batch that fits and of the next larger one:
"""

SHARES = """## What a process holds, times processes, over what one device holds

All entries are estimated for the same model and batch (4 sequences per process). 1.00 would mean
that everything is sharded perfectly, including workspace and messages.
"""

PRICE = """## What each method costs

One step of 4 layers with h = 512, s = 128, v = 8192, attention dropout 0.1 and b = 16, in float32.
**Time** is the step's time divided by the first row's, as the median of the ratios within rounds.
**Arithmetic** is the same ratio of floating-point operations in products, counted as they run. The
models of all methods take turns on the same processes, on 2 cores.
"""


def report(found: Found) -> str:
    """Return Markdown of all results."""
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
    for name in SCALINGS:
        peaks = {
            (processes, title): one["found"]
            for one in found
            if one["case"][:2] == ["equal", name]
            for processes, title in [one["case"][2:]]
        }
        if peaks:
            parts += [EQUAL.format(name=name), _equal(peaks), _by_columns(peaks)]
    shares = [one for one in found if one["case"][0] == "share"]
    if shares:
        parts += [SHARES, _shares(shares)]
    prices = [one for one in found if one["case"][0] == "price"]
    if prices:
        parts += [PRICE, *(_prices(one) for one in prices)]
    return "\n".join(parts)


def _limits(limits: dict[tuple[int, str], dict[str, Any]]) -> str:
    processes = sorted({number for number, _ in limits})
    rows = []
    for row, found in _families(limits).items():
        cells = []
        for number in processes:
            title, one = max(
                found.get(number, {}).items(), key=lambda each: each[1]["batch"], default=("", None)
            )
            if one is None or not one["batch"]:
                cells.append("" if one is None else "none")
                continue
            than = limits.get((number, "megatron"))
            times = ""
            if than and than["batch"] and row != "megatron":
                times = f" ({one['batch'] / than['batch']:.1f}x)"
            cells.append(f"{one['batch']}{times}{_which(title)}")
        rows.append([row, *cells])
    return _table(["largest batch", *(f"p = {number}" for number in processes)], rows)


def _families(
    found: dict[tuple[int, str], dict[str, Any]],
) -> dict[str, dict[int, dict[str, dict[str, Any]]]]:
    """Return results by row of a table, processes and title, in the order of `schemes`."""
    numbers = sorted({number for number, _ in found})
    rows: dict[str, dict[int, dict[str, dict[str, Any]]]] = {
        family(title): {} for number in numbers for title in schemes(number)
    }
    for (number, title), one in found.items():
        rows[family(title)].setdefault(number, {})[title] = one
    return {row: by_number for row, by_number in rows.items() if by_number}


def _which(title: str) -> str:
    """Return the best number of columns, for a hybrid."""
    return f", c = {columns(title)}" if family(title) == HYBRID else ""


def _equal(peaks: dict[tuple[int, str], dict[str, Any]]) -> str:
    processes = sorted({number for number, _ in peaks})
    batches = {n: max(one["batch"] for (m, _), one in peaks.items() if m == n) for n in processes}
    rows = []
    for row, found in _families(peaks).items():
        cells = []
        for number in processes:
            fitting = {t: one for t, one in found.get(number, {}).items() if one["batch"]}
            if not fitting:
                cells.append("")
                continue
            title, one = min(fitting.items(), key=lambda each: each[1]["peak"])
            batch = "" if one["batch"] == batches[number] else f" ({one['batch']})"
            cells.append(f"{one['peak'] / 1e9:.1f}{batch}{_which(title)}")
        rows.append([row, *cells])
    return _table(["GB a process", *(f"p = {n}, b = {b}" for n, b in batches.items())], rows)


def _by_columns(peaks: dict[tuple[int, str], dict[str, Any]]) -> str:
    """Return a table of all hybrids' peaks."""
    found = {
        (number, columns(title)): f"{one['peak'] / 1e9:.1f}"
        for (number, title), one in peaks.items()
        if family(title) == HYBRID and one["batch"]
    }
    every = sorted({c for _, c in found})
    rows = [
        [f"p = {number}", *(found.get((number, c), "") for c in every)]
        for number in sorted({number for number, _ in found})
    ]
    return _table([HYBRID, *(f"c = {c}" for c in every)], rows) if rows else ""


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
    """Plot largest batches by processes, one panel per scaling, and peaks at one global batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator

    limits = {n: _best(found, "limit", n, "batch", max) for n in SCALINGS}
    peaks = {n: _best(found, "equal", n, "peak", min) for n in SCALINGS}
    panels = [("limit", name) for name in SCALINGS if limits[name]]
    panels += [("equal", name) for name in SCALINGS if peaks[name]]
    rows = [*dict.fromkeys(family(title) for number in PROCESSES for title in schemes(number))]
    colors = ["#333333", *(f"C{i}" for i in range(10))]  # the first color is for one device
    styles = {row: {"color": colors[i], "marker": "os^vD"[i % 5]} for i, row in enumerate(rows)}
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 5), layout="constrained", squeeze=False
    )
    for axes, (kind, name) in zip(all_axes[0], panels):
        lines, scale = (limits[name], 1.0) if kind == "limit" else (peaks[name], 1e9)
        for row in (row for row in rows if row in lines):
            points = sorted(lines[row].items())
            axes.plot(
                [p for p, _ in points],
                [value / scale for _, (value, _) in points],
                label=row,
                markersize=5,
                **styles[row],
            )
            for p, (value, measured) in points:
                if measured:
                    axes.plot(p, value, "s", color="#333333", markersize=11, fillstyle="none")
        budget = SCALINGS[name].budget
        room = f"{budget / 1e9:.0f} GB" if budget > GIB else f"{budget / 1e6:.0f} MB"
        if kind == "limit":
            seen = any(measured for row in lines.values() for _, measured in row.values())
            axes.set(
                yscale="log",
                ylabel="largest batch",
                title=f"{name}: {room} a process" + (", squares measured" if seen else ""),
            )
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.set(ylabel="GB a process", title=f"{name}: at one global batch (of Optimus)")
            axes.set_ylim(bottom=0)
        axes.set(xscale="log", xlabel="processes p (h grows with the root of p)")
        axes.set_xticks(PROCESSES, [str(number) for number in PROCESSES])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    legend: dict[str, Any] = {}
    for axes in all_axes[0]:
        handles, labels = axes.get_legend_handles_labels()
        legend.update(zip(labels, handles))
    shown = [row for row in rows if row in legend]
    figure.legend(
        [legend[row] for row in shown],
        shown,
        loc="outside lower center",
        ncols=min(4, max(2, len(all_axes[0]) + 1)),
        frameon=False,
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _best(
    found: Found, part: str, name: str, key: str, of: Callable[..., tuple[int, bool]]
) -> dict[str, dict[int, tuple[int, bool]]]:
    """Return a part's best nonzero values by row and processes, and whether they were measured."""
    best: dict[str, dict[int, tuple[int, bool]]] = {}
    for one in found:
        if one["case"][:2] == [part, name] and one["found"]["batch"]:
            _, _, number, title = one["case"]
            point = one["found"][key], one["found"].get("measured") is not None
            row = best.setdefault(family(title), {})
            row[number] = of(point, row.get(number, point))
    return best


def _machine(machine: dict[str, str]) -> str:
    return (
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"{machine['date']}, commit {machine['commit']}: `{machine['command']}`."
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
