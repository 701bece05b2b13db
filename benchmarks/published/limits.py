"""The largest batches of Optimus' paper: what its layers hold on 4 to 64 devices of 16 GB.

The published statement is about 64 devices: Optimus ran b = 480 there, eight times what Megatron
could. As in the paper these are 24 layers alone in float32 with recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from benchmarks.memory.limits import search
from benchmarks.planner.rows import FRONTERA, gpt
from gridformer.cluster.file import load_cluster
from gridformer.config import RunConfig
from gridformer.parallel.registry import spec_of
from gridformer.parallel.validation import check_layout
from gridformer.plan.predict import unfused
from gridformer.utils.units import GIB

LAYERS, SEQ = 24, 512
WORDS = 64  # so few that the table takes next to nothing
SHAPES = {4: (2048, 32), 16: (4096, 64), 36: (6120, 72), 64: (8192, 128)}  # hidden size, heads
PUBLISHED = {("megatron", 64): 60, ("optimus, the paper's broadcasts", 64): 480}


def layouts(devices: int) -> dict[str, dict[str, Any]]:
    """Returns the layouts that are compared on this number of devices."""
    q = round(devices**0.5)
    grid = {"scheme": "optimus", "rows": q, "cols": q, "devices_per_node": 4}
    return {
        "megatron": {"scheme": "megatron", "cols": devices, "devices_per_node": 4},
        "optimus, the paper's broadcasts": {
            **grid,
            "schedule": "broadcast",
            "stationary": "output",
        },
        "optimus": grid,
    }


def run_of(layout: dict[str, Any], batch: int) -> RunConfig:
    """Returns a run of the layers, whose devices keep the scores of attention, as in the paper."""
    cols, rows = layout["cols"], layout.get("rows", 1)
    sizes = (LAYERS, *SHAPES[cols * rows], SEQ, WORDS)
    train = {"global_batch": batch, "recompute": "full", "device": "cuda"}
    run = gpt(sizes, layout, train)
    check_layout(run)
    return unfused(run, load_cluster(FRONTERA))


def largest_batches(devices: Sequence[int] = tuple(SHAPES)) -> dict[str, dict[int, int]]:
    """Returns the largest batches that fit, by layout and number of devices."""
    budget = int(load_cluster(FRONTERA).limit_gib * GIB)
    found: dict[str, dict[int, int]] = {}
    for n in devices:
        for name, layout in layouts(n).items():
            placed = run_of(layout, 8 * n).layout
            unit = spec_of(placed).batch_parts(placed)
            limit = search(lambda batch, one=layout: run_of(one, batch), unit, budget)  # type: ignore[misc]
            typer.echo(f"largest batch of {name} on {n} devices: {limit.batch}", err=True)
            found.setdefault(name, {})[n] = limit.batch
    return found


def limit_lines(found: dict[str, dict[int, int]]) -> list[str]:
    """Returns a table of batches, relative to Megatron's, with what was published."""
    devices = [*next(iter(found.values()))]
    lines = [
        "| largest batch | "
        + " | ".join(f"p = {n}, h = {SHAPES[n][0]:,}" for n in devices)
        + " | published, p = 64 |",
        "|---|" + "---:|" * (len(devices) + 1),
    ]
    for name, batches in found.items():
        cells = []
        for n, batch in batches.items():
            than = found["megatron"][n]
            times = f" ({batch / than:.1f}x)" if name != "megatron" and than else ""
            cells.append(f"{batch}{times}")
        known = PUBLISHED.get((name, 64))
        said = "" if known is None else f"{known}" if name == "megatron" else f"{known} (8x)"
        lines.append(f"| {name} | {' | '.join(cells)} | {said} |")
    return lines
