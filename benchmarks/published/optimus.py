"""The scaling experiments of Optimus (Xu et al. 2021): published, and what the planner says.

    python -m benchmarks.published.optimus --out docs/results/published-optimus.md \
        --plot docs/results/published-optimus.png

The weak scaling is predicted from traces, the isoefficiency from estimates. Nothing here runs on a
cluster. `python -m benchmarks.published` measures Optimus against Megatron on an emulated one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.common.machine import command_line, describe_machine
from benchmarks.common.page import write_page
from benchmarks.planner.pricing import cluster_of, predicted, record
from benchmarks.planner.rows import FRONTERA, TRACED_LAYERS, calibration_rows, gpt
from gridformer.cluster import Cluster, load_cluster
from gridformer.config import RunConfig
from gridformer.parallel.validation import check
from gridformer.plan.analytic import Estimate, estimate

PAPER = "Xu, Li, Gong and You 2021 (Optimus)"
SIDES = (2, 4, 6, 8)  # of the square grids of the paper's Table 2
ISO_SIDES = (2, 4, 8, 16, 32)
EFFICIENCIES = (0.8, 0.9)
SEQ, WORDS = 512, 1152
SEQUENCES = 1 / 32  # b / h in the isoefficiency, so that the work grows as h cubed

# What lies on the grid, as fields of a layout, by the side q of the grid.
KINDS: dict[str, Callable[[int], dict[str, object]]] = {
    "megatron": lambda q: {"scheme": "megatron", "cols": q * q},
    "optimus, the paper's broadcasts": lambda q: {
        "scheme": "optimus",
        "rows": q,
        "cols": q,
        "schedule": "broadcast",
        "stationary": "output",
    },
    "optimus": lambda q: {"scheme": "optimus", "rows": q, "cols": q},
}
EXPONENTS = {"megatron": "3", "optimus, the paper's broadcasts": "1.5, times log p cubed"}


# --------------------------------------------------------------------------- weak scaling


@dataclass(frozen=True)
class Point:
    """A row of Table 2: the work of a sequence per device, and the seconds that it takes."""

    scheme: str
    devices: int
    flops: float
    published_s: float
    predicted_s: float


def flops_of(run: RunConfig, layers: int) -> float:
    """Returns the operations of one sequence, forward and backward with recomputation."""
    h, s = run.model.hidden_size, run.model.max_seq_len
    return 4.0 * layers * (24 * s * h * h + 4 * s * s * h)


def weak_scaling() -> list[Point]:
    """Predicts all rows of Table 2."""
    found = []
    for row in calibration_rows(FRONTERA):
        scheme, devices = row.name.split(" / ")
        seconds = predicted(record(row), cluster_of(row))
        typer.echo(f"{row.name}: {seconds:.3f} s a sequence", err=True)
        found.append(
            Point(scheme, int(devices), flops_of(row.run, row.layers), row.published, seconds)
        )
    return found


def relative_rate(points: Sequence[Point], which: str) -> dict[int, float]:
    """Returns the rate of a device relative to that on the fewest devices."""
    rates = {p.devices: p.flops / p.devices / getattr(p, which) for p in points}
    return {devices: rate / rates[min(rates)] for devices, rate in rates.items()}


def gustafson(rates: dict[int, float]) -> float:
    """Fits the part of a device's time that does not scale, from relative rates.

    With n times the devices and n times the work the speed is n - f (n - 1), by least squares.
    """
    first = min(rates)
    n = np.array([devices / first for devices in rates])
    speed = n * np.array([*rates.values()])
    return float(((n - speed) @ (n - 1)) / ((n - 1) @ (n - 1)))


def weak_lines(points: Sequence[Point]) -> list[str]:
    lines = [
        "| devices | megatron, published | predicted | optimus, published | predicted | "
        "optimus against megatron, published | predicted |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    sides = {s: [p for p in points if p.scheme == s] for s in ("megatron", "optimus")}
    rates = {
        (scheme, which): relative_rate(some, which)
        for scheme, some in sides.items()
        for which in ("published_s", "predicted_s")
    }
    for mine, theirs in zip(sides["optimus"], sides["megatron"]):
        cells = [f"{mine.devices}"]
        for scheme in ("megatron", "optimus"):
            for which in ("published_s", "predicted_s"):
                cells.append(f"{rates[scheme, which][mine.devices]:.2f}")
        cells.append(f"{theirs.published_s / mine.published_s:.2f}")
        cells.append(f"{theirs.predicted_s / mine.predicted_s:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    shares = [f"{gustafson(rate):.1%}" for rate in rates.values()]
    return [*lines, f"| f of Gustafson's law | {' | '.join(shares)} | | |"]


# --------------------------------------------------------------------------- strong scaling


def strong_scaling() -> dict[str, dict[int, float]]:
    """Returns the estimated speed on p devices relative to four, for one model and batch."""
    found: dict[str, dict[int, float]] = {}
    cluster = load_cluster(FRONTERA)
    for kind in KINDS:
        times = {q * q: _estimate(kind, q, 4096, 64, 256, cluster).step_s for q in ISO_SIDES[:-1]}
        found[kind] = {p: times[4] / seconds for p, seconds in times.items()}
    return found


def amdahl(speeds: dict[int, float]) -> float:
    """Fits the part of the time on four devices that more of them do not shorten."""
    n = np.array([p / 4 for p in speeds])
    inverse = 1 / np.array([*speeds.values()])  # f + (1 - f) / n
    return float(((inverse - 1 / n) @ (1 - 1 / n)) / ((1 - 1 / n) @ (1 - 1 / n)))


def strong_lines(found: dict[str, dict[int, float]]) -> list[str]:
    devices = [*next(iter(found.values()))]
    lines = [
        "| | " + " | ".join(f"{p} devices" for p in devices) + " | f of Amdahl's law |",
        "|---|" + "---:|" * (len(devices) + 1),
    ]
    for kind, speeds in found.items():
        cells = " | ".join(f"{speed:.2f}" for speed in speeds.values())
        lines.append(f"| {kind} | {cells} | {min(1.0, amdahl(speeds)):.0%} |")
    return lines


# --------------------------------------------------------------------------- isoefficiency


def flat(cluster: Cluster) -> Cluster:
    """Returns a cluster whose devices have a link each, all with the rate of a node's link."""
    outer = cluster.levels[-1].model_copy(update={"shared_by": 1, "size": 1 << 20})
    fitted = {name: one for name, one in cluster.fitted.items() if name != "slowdown_per_node"}
    inner = cluster.levels[0].model_copy(update={"size": 1})
    return cluster.model_copy(update={"levels": (inner, outer), "fitted": fitted})


def _estimate(kind: str, q: int, h: int, batch: int, heads: int, cluster: Cluster) -> Estimate:
    layout = {**KINDS[kind](q), "devices_per_node": 4 if cluster.node_size > 1 else 0}
    train = {"global_batch": batch, "clip_norm": 0}
    # Runs have a limit of width, which the isoefficiency of Megatron exceeds.
    run = gpt((TRACED_LAYERS, heads, heads, SEQ, WORDS), layout, train)
    sizes = {"hidden_size": h, "ffn_size": 4 * h}
    run = run.model_copy(update={"model": run.model.model_copy(update=sizes)})
    check(run)
    return estimate(run, cluster)


def efficiency(kind: str, q: int, h: int, cluster: Cluster) -> float:
    """Returns the estimated share of a step in which devices compute and wait for no message."""
    heads = max(q * q, 32)
    found = _estimate(kind, q, h, max(q, round(h * SEQUENCES / q) * q), heads, cluster)
    return found.load.compute_s / found.load.device_s


def width_for(kind: str, q: int, target: float, cluster: Cluster) -> float:
    """Finds the hidden size with which q x q devices reach an efficiency, by bisection.

    Widths are multiples of the number of heads, from 1,024 on; between the last two it
    interpolates.
    """
    unit = max(q * q, 32)
    low = high = max(1, 1024 // unit)
    if efficiency(kind, q, low * unit, cluster) >= target:
        return math.nan
    while efficiency(kind, q, high * unit, cluster) < target:
        low, high = high, 2 * high
        if high * unit > 1 << 24:
            return math.nan
    while high - low > 1:
        middle = (low + high) // 2
        reached = efficiency(kind, q, middle * unit, cluster) >= target
        low, high = (low, middle) if reached else (middle, high)
    below, above = (efficiency(kind, q, n * unit, cluster) for n in (low, high))
    share = (target - below) / (above - below) if above > below else 1.0
    return unit * (low + min(1.0, max(0.0, share)) * (high - low))


def isoefficiency(target: float, cluster: Cluster) -> dict[str, dict[int, float]]:
    """Returns the hidden sizes with which p devices reach an efficiency."""
    found: dict[str, dict[int, float]] = {}
    for kind in KINDS:
        found[kind] = {q * q: width_for(kind, q, target, cluster) for q in ISO_SIDES}
    return found


def exponent(widths: dict[int, float]) -> float:
    """Returns x of work ~ p**x, where the work grows with the cube of the width."""
    pairs = [(math.log(p), 3 * math.log(w)) for p, w in widths.items() if not math.isnan(w)]
    x, y = np.array(pairs).T
    return float(np.polyfit(x, y, 1)[0])


def iso_lines(found: dict[str, dict[int, float]]) -> list[str]:
    devices = [*next(iter(found.values()))]
    lines = [
        "| h with which it is reached | "
        + " | ".join(f"p = {p:,}" for p in devices)
        + " | exponent of the work | the paper's |",
        "|---|" + "---:|" * (len(devices) + 1) + "---|",
    ]
    for kind, widths in found.items():
        cells = " | ".join("< 1,024" if math.isnan(w) else f"{w:,.0f}" for w in widths.values())
        lines.append(f"| {kind} | {cells} | {exponent(widths):.2f} | {EXPONENTS.get(kind, '-')} |")
    return lines


# --------------------------------------------------------------------------- the page


def plot(points: Sequence[Point], iso: dict[str, dict[int, float]], path: Path) -> None:
    """Draws the weak scaling, published and predicted, and the isoefficiency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    for scheme, color in (("megatron", "#3182bd"), ("optimus", "#e6550d")):
        mine = [p for p in points if p.scheme == scheme]
        devices = [p.devices for p in mine]
        left.plot(devices, [p.published_s for p in mine], "o-", color=color,
                  label=f"{scheme}, published")  # fmt: skip
        left.plot(devices, [p.predicted_s for p in mine], "x--", color=color,
                  label=f"{scheme}, predicted")  # fmt: skip
    left.set_xlabel("devices")
    left.set_ylabel("seconds a sequence")
    left.set_title("weak scaling on Frontera (Table 2)")
    left.set_ylim(0)
    for kind, widths in iso.items():
        label = f"{kind}: work ~ p^{exponent(widths):.2f}"
        right.loglog([*widths], [*widths.values()], "o-", label=label)
    right.set_xlabel("devices")
    right.set_ylabel("hidden size")
    right.set_title(f"hidden size for an efficiency of {EFFICIENCIES[0]:.0%}, by estimate")
    right.set_ylim(top=right.get_ylim()[1] * 30)  # room for the legend
    for axis in (left, right):
        axis.legend(fontsize=8, loc="upper left")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(
    out: Annotated[
        Path | None, typer.Option(help="The Markdown file to write; else it is printed.")
    ] = None,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", help="The figure to write, beside the page.")
    ] = None,
) -> None:
    """Predict the experiments and compare them with what was published."""
    about = describe_machine("benchmarks.published.optimus")
    points = weak_scaling()
    network = flat(load_cluster(FRONTERA))
    iso = {target: isoefficiency(target, network) for target in EFFICIENCIES}
    parts = [
        "# Optimus on Frontera: published and predicted",
        f"{about['date']}, commit {about['commit'] or 'unknown'}: "
        f"`{command_line('benchmarks.published.optimus')}`. Nothing ran on Frontera. Source of "
        f"what is published: {PAPER}.",
        "## Weak scaling",
        _WEAK,
        "\n".join(weak_lines(points)),
        *(
            [f"![Seconds a sequence over devices, and isoefficiency]({plot_to.name})"]
            if plot_to
            else []
        ),
        "## Strong scaling",
        _STRONG,
        "\n".join(strong_lines(strong_scaling())),
        "## Isoefficiency",
        _ISO,
    ]
    for target, found in iso.items():
        parts += [f"Efficiency {target:.0%}:", "\n".join(iso_lines(found))]
    if plot_to is not None:
        plot(points, iso[EFFICIENCIES[0]], plot_to)
    write_page(parts, out)


_WEAK = """\
Table 2 of the paper: float32, full recomputation, 24 layers, s=512. Rates are operations a device
and second relative to four devices. The cluster's numbers are fitted to these rows
(docs/results/planner.md), so the columns show what a model with four numbers can follow, not a
test of it. The last row fits the part of the time that does not scale by Gustafson's law."""
_STRONG = """\
By estimate; no published numbers of strong scaling are at hand. One model (two layers of h=4,096
with 256 heads) and a batch of 64 on more and more devices: speed relative to four devices, and the
part of the time on four devices that more devices do not shorten, by Amdahl's law."""
_ISO = """\
By estimate: the hidden size with which p devices reach an efficiency, the share of a step in which
a device computes. As in the paper the batch grows with it (b = h / 32, s=512), so the work grows
with its cube. The network is flat, as in the paper's derivation: each device has a link of its own
with the rate of a node's link on Frontera. The paper derives W ~ p^3 for Megatron and
W ~ (sqrt(p) log p)^3 for Optimus. Its log p comes from broadcasts along trees; those of a pipelined
ring, which are modeled here, take no log p, so its exponent here is 1.5. The row "optimus" is our
default, in which each product keeps an operand in place: about the same exponent, with a hidden
size a tenth as large."""


if __name__ == "__main__":
    typer.run(main)
