"""What a layer computes and sends under Megatron and Optimus: formulas beside what the code does.

These are both halves of table 1 of Xu et al. 2021 (Optimus): operations, and elements that travel,
in the forward and the backward pass, with recomputation. The formulas are those of the project's
specification; the counts are those of the recorded code of one rank, which is traced twice, with
and without recomputation, so that the difference is what recomputation adds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from benchmarks.planner.rows import gpt
from gridformer.cluster.file import Cluster
from gridformer.plan.predict import record_run
from gridformer.record.events import Kernel, Start

PHASES = ("forward", "recomputation", "backward")
B, S, H, HEADS = 8, 512, 1024, 16  # of the traced layer
SIDES = (2, 4)  # of the grids that are traced
_LAYER = "layers.1."  # not the first one, whose norm follows the embedding


@dataclass(frozen=True)
class Costs:
    """What a rank does in a layer, for each phase.

    Attributes:
        flop: Its operations in products and attention.
        elements: The elements of operands and results of products that cross its link.
    """

    flop: dict[str, float]
    elements: dict[str, float]


def layouts(q: int) -> dict[str, dict[str, Any]]:
    """Returns the layouts on q x q devices."""
    grid = {"scheme": "optimus", "rows": q, "cols": q, "devices_per_node": 4}
    return {
        "megatron": {"scheme": "megatron", "cols": q * q, "devices_per_node": 4},
        "optimus, the paper's broadcasts": {
            **grid,
            "schedule": "broadcast",
            "stationary": "output",
        },
        "optimus": {**grid, "schedule": "gather"},
    }


def moved(start: Start) -> float:
    """Returns the elements that must cross a rank's link, as `gridformer.comm.recorder` counts.

    Where one rank is the root, it is the mean over all ranks, each of which is the root as often.
    """
    n, size = len(start.ranks), start.size
    if start.op == "all_reduce":
        return 2 * (n - 1) / n * size
    if start.op == "all_gather":
        return (n - 1) * size
    if start.op in ("reduce_scatter", "broadcast", "reduce"):
        return (n - 1) / n * size
    raise ValueError(f"no message of a layer is a {start.op}")


def counted(layout: dict[str, Any]) -> Costs:
    """Counts what a rank does in a layer."""
    flop, elements = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
    for recompute in ("none", "full"):
        train = {"global_batch": B, "recompute": recompute, "clip_norm": 0}
        run = gpt((3, H, HEADS, S, 1152), layout, train)
        sign = 1 if recompute == "full" else -1
        for event in record_run(run, all_layers=True).traces[0].unfolded():
            if not isinstance(event, Kernel | Start) or not event.place.module.startswith(_LAYER):
                continue
            phase = "backward" if event.place.backward else "forward"
            if isinstance(event, Kernel):
                found, amount = flop, float(event.flop)
            elif event.label == "product":
                found, amount = elements, moved(event)
            else:
                continue  # statistics of norms, and what recomputation keeps
            if recompute == "none":
                found[phase] += amount
            if phase == "backward":
                found["recomputation"] += sign * amount
    return Costs(flop, elements)


def flop_formula(devices: int) -> float:
    """Returns a rank's operations in the forward pass of a layer, two for a multiplication.

    A backward pass takes twice as many, recomputation as many again, but for the last product.
    """
    return 2 * (12 * B * S * H**2 + 2 * B * S**2 * H) / devices


def megatron_elements(p: int) -> float:
    """Returns the elements that rings of Megatron move in a forward pass: 4 (p - 1)/p bsh."""
    return 4 * (p - 1) / p * B * S * H


def optimus_elements(q: int, tree: bool, activations: int = 7) -> float:
    """Returns the elements that a forward pass of Optimus moves.

    Args:
        q: The side of the grid.
        tree: Whether broadcasts go along trees, as in the paper: log2(q)/q instead of (q - 1)/q^2.
        activations: How many bsh travel: 7, or 4 if the narrower of input and output does.
    """
    factor = math.log2(q) / q if tree else (q - 1) / q**2
    return factor * (activations * B * S * H + 12 * H**2)


# Backward and recomputation, relative to a forward pass.
BACKWARD = {"megatron": 1, "optimus": 2}


def formula(kind: str, q: int, phase: str, tree: bool = False) -> float:
    """Returns the elements of a phase by formula; see `layouts` for the kinds."""
    if kind == "megatron":
        return megatron_elements(q * q)
    forward = optimus_elements(q, tree, 4 if kind == "optimus" else 7)
    return forward * (2 if phase == "backward" else 1)


def cost_lines(sides: Sequence[int] = SIDES) -> list[str]:
    """Counts all layouts, and returns the table of operations and that of elements."""
    found = {(kind, q): counted(one) for q in sides for kind, one in layouts(q).items()}
    typer.echo("counted what layers compute and send", err=True)
    head = "| layout | devices | " + " | ".join(f"{phase}, formula | counted" for phase in PHASES)
    rule = "|---|---:|" + "---:|---:|" * len(PHASES)
    lines = ["Operations of a rank in a layer, in 10^9:", "", f"{head} |", rule]
    for (kind, q), one in found.items():
        cells = []
        for phase in PHASES:
            times = 2 if phase == "backward" else 1
            cells += [f"{times * flop_formula(q * q) / 1e9:.2f}", f"{one.flop[phase] / 1e9:.2f}"]
        lines.append(f"| {kind} | {q * q} | {' | '.join(cells)} |")
    lines += ["", "Elements of products that cross a rank's link in a layer, in 10^6:", ""]
    lines += [f"{head} | forward along trees, formula |", f"{rule}---:|"]
    for (kind, q), one in found.items():
        cells = []
        for phase in PHASES:
            cells += [f"{formula(kind, q, phase) / 1e6:.2f}", f"{one.elements[phase] / 1e6:.2f}"]
        tree = "" if kind == "megatron" else f"{formula(kind, q, 'forward', tree=True) / 1e6:.2f}"
        lines.append(f"| {kind} | {q * q} | {' | '.join(cells)} | {tree} |")
    return lines


# --------------------------------------------------------------------------- what follows


def message_seconds(
    kind: str, q: int, width: int, batch: int, cluster: Cluster, tree: bool
) -> float:
    """Returns the seconds of messages of a layer, forward and backward with recomputation.

    As in the paper: elements times the time of one, without latency.
    """
    scaled = B * S * H, H**2
    phases = [formula(kind, q, phase, tree) for phase in PHASES]
    if kind == "megatron":
        elements = sum(phases) * batch * S * width / scaled[0]
    else:
        factor = math.log2(q) / q if tree else (q - 1) / q**2
        activations = 4 if kind == "optimus" else 7
        elements = 4 * factor * (activations * batch * S * width + 12 * width**2)
    level = cluster.levels[-1]
    rate = level.bandwidth_gbps.value * 1e9 * cluster.number("outer_efficiency")
    return 4 * elements / rate


def efficiency(
    kind: str, q: int, width: int, batch: int, cluster: Cluster, tree: bool = False
) -> float:
    """Returns E = 1 / (1 + p T / W): the share of a layer's time that is computation."""
    operations = 4 * 2 * (12 * batch * S * width**2 + 2 * batch * S**2 * width)
    peak = cluster.device.peak_tflops["float32"].value * 1e12
    work = operations / (peak * cluster.number("product_efficiency"))  # seconds on one device
    messages = message_seconds(kind, q, width, batch, cluster, tree)
    return 1 / (1 + q * q * messages / work)


def equation_lines(cluster: Cluster, width: int = 8192, batch: int = 384) -> list[str]:
    """Returns seconds of messages and efficiencies by formula, over the number of devices."""
    sides = (2, 4, 8, 16, 32)
    lines = [
        "| | " + " | ".join(f"p = {q * q:,}" for q in sides) + " |",
        "|---|" + "---:|" * len(sides),
    ]
    cases = [("megatron", False), ("optimus, the paper's broadcasts", True),
             ("optimus, the paper's broadcasts", False), ("optimus", False)]  # fmt: skip
    for kind, tree in cases:
        name = f"{kind}, {'trees' if tree else 'rings'}"
        times = [message_seconds(kind, q, width, batch, cluster, tree) for q in sides]
        shares = [efficiency(kind, q, width, batch, cluster, tree) for q in sides]
        cells = " | ".join(f"{1e3 * t:.0f} ms, {e:.0%}" for t, e in zip(times, shares))
        lines.append(f"| {name} | {cells} |")
    return lines
