"""The isoefficiency of Optimus and Megatron, by estimates and root-finding, and strong scaling."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from benchmarks.planner.rows import FRONTERA, TRACED_LAYERS, gpt
from gridformer.cluster.file import Cluster, load_cluster
from gridformer.parallel.validation import check_layout
from gridformer.plan.roofline import Estimate, estimate

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
        lines.append(f"| {kind} | {cells} | {amdahl(speeds):.0%} |")
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
    check_layout(run)
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


def gain(found: dict[str, dict[int, float]]) -> tuple[float, float]:
    """Returns the least and the most by which the grid's default needs smaller hidden sizes."""
    paper, ours = found["optimus, the paper's broadcasts"], found["optimus"]
    times = [paper[p] / ours[p] for p in ours if not math.isnan(paper[p] + ours[p])]
    return min(times), max(times)


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
