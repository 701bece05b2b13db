"""Which scheme wins where: the fastest layout of each kind over devices and batch.

    python -m benchmarks.planner map --plot docs/results/planner-map.png

In each cell every kind of layout gets the best settings that fit by the estimates of `gridformer
plan`, and is then traced as `gridformer predict` does. Memory is that of the estimates. It prints
Markdown.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gridformer.cluster.file import load_cluster
from gridformer.config import RunConfig, parse_run
from gridformer.plan.predict import predict
from gridformer.plan.search import PlannedLayout, Search, fastest_dtype, sharding

IMPROVED = 2  # arrangements of each kind whose settings are improved
CLOSE = 0.10  # what differs by less counts as close
PROCESSES = 2

# Kinds of layouts, with their color in the figure. The strongest alternatives have replicas of any
# mode, FSDP among them, and every kind may have a pipeline.
KINDS = {
    "data parallel": "#9ecae1",  # or FSDP
    "Megatron": "#3182bd",
    "rows alone": "#c7e9c0",
    "2-D grid": "#e6550d",
    "sub-graph": "#fdd0a2",
    "nothing fits": "#eeeeee",
}


@dataclass(frozen=True)
class Case:
    """A model on a cluster, and the cells of its map."""

    cluster: str
    model: str
    devices: tuple[int, ...]
    batches: tuple[int, ...]


CASES = (
    Case("dgx-h100", "megatron-8.3b", (8, 32, 128, 512), (64, 512, 4096)),
    Case("frontera-rtx5000", "megatron-1.2b", (4, 16, 64, 256), (64, 256, 1024)),
)
Cell = dict[str, PlannedLayout]


def cell_of(run: RunConfig, cluster: str, n_devices: int) -> Cell:
    """Returns the fastest layout of each kind that fits, traced, fastest first."""
    search = Search(run, load_cluster(cluster), n_devices, named=cluster)
    of_kind: dict[str, list[PlannedLayout]] = {}
    for arrangement in search.arrangements():
        found = search.first(arrangement)
        if found.estimate.fits:
            of_kind.setdefault(sharding(arrangement.layout), []).append(found)
    best: Cell = {}
    for kind, some in of_kind.items():
        some.sort(key=lambda one: one.step_s)
        improved = [search.improved(one, margin=1.0) for one in some[:IMPROVED]]
        chosen = [search.for_cluster(one) for one in (*improved, some[0])]
        best[kind] = min((*chosen, *some), key=lambda one: one.step_s)
    traced = {
        kind: replace(one, prediction=predict(one.run, load_cluster(cluster), memory=False))
        for kind, one in best.items()
    }
    return dict(sorted(traced.items(), key=lambda item: item[1].step_s))


def _cell(case: Case, place: tuple[int, int]) -> Cell:
    batch, n = place
    dtype = fastest_dtype(load_cluster(case.cluster))
    settings = [f"train.dtype={dtype}", f"train.global_batch={batch}"]
    run = parse_run({"model": case.model, "data": {"path": "."}}, settings)
    found = cell_of(run, case.cluster, n)
    print(f"{case.cluster} {n} devices, batch {batch}", file=sys.stderr, flush=True)
    return found


def map_of(case: Case) -> dict[tuple[int, int], Cell]:
    """Returns the cells of a map by (batch, devices)."""
    places = [(batch, n) for batch in case.batches for n in case.devices]
    with ProcessPoolExecutor(PROCESSES) as pool:
        return dict(zip(places, pool.map(partial(_cell, case), places)))


def lines_of(case: Case, cells: dict[tuple[int, int], Cell]) -> list[str]:
    """Returns the table of a map: winner, its time, and the others' times relative to it."""
    dtype = fastest_dtype(load_cluster(case.cluster))
    lines = [
        f"## {case.model} on {case.cluster}, {dtype}",
        "",
        "| batch | devices | fastest | s a step | the best of other kinds, relative to it |",
        "|---:|---:|---|---:|---|",
    ]
    for (batch, n), cell in cells.items():
        if not cell:
            lines.append(f"| {batch} | {n} | nothing fits | | |")
            continue
        (_, first), *others = cell.items()
        rest = ", ".join(
            f"{kind} {one.step_s / first.step_s:.2f} ({one.name})" for kind, one in others
        )
        lines.append(f"| {batch} | {n} | {first.name} | {first.step_s:.3g} | {rest} |")
    return lines


def plot(maps: Sequence[tuple[Case, dict[tuple[int, int], Cell]]], path: Path) -> None:
    """Draws the maps: the color of the fastest kind, and what a 2-D grid takes relative to it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch, Rectangle

    figure, axes = plt.subplots(1, len(maps), figsize=(6.2 * len(maps), 4.6), squeeze=False)
    for axis, (case, cells) in zip(axes[0], maps):
        for (batch, n), cell in cells.items():
            x, y = case.devices.index(n), case.batches.index(batch)
            kind = next(iter(cell), "nothing fits")
            axis.add_patch(Rectangle((x, y), 1, 1, facecolor=KINDS[kind], edgecolor="white"))
            axis.text(x + 0.5, y + 0.5, _label(cell), ha="center", va="center", fontsize=8)
        axis.set_xlim(0, len(case.devices))
        axis.set_ylim(0, len(case.batches))
        axis.set_xticks([i + 0.5 for i in range(len(case.devices))], map(str, case.devices))
        axis.set_yticks([i + 0.5 for i in range(len(case.batches))], map(str, case.batches))
        axis.set_xlabel("devices")
        axis.set_ylabel("sequences a step")
        axis.set_title(f"{case.model} on {case.cluster}")
    handles = [Patch(color=color, label=kind) for kind, color in KINDS.items()]
    figure.legend(handles=handles, loc="lower center", ncol=len(handles), fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=120)


def _label(cell: Cell) -> str:
    if not cell:
        return "nothing\nfits"
    best = next(iter(cell.values()))
    name = best.name.replace(", ", "\n")
    grid = cell.get("2-D grid")
    if grid is None:
        return f"{name}\n2-D: does not fit"
    if grid is best:
        return name
    return f"{name}\n2-D: {grid.step_s / best.step_s:.2f}"


def wins(cells: dict[tuple[int, int], Cell]) -> str:
    """Says in how many cells a 2-D grid is fastest."""
    filled = [cell for cell in cells.values() if cell]
    first = sum(next(iter(cell)) == "2-D grid" for cell in filled)
    near = sum(
        "2-D grid" in cell
        and cell["2-D grid"].step_s <= (1 + CLOSE) * next(iter(cell.values())).step_s
        for cell in filled
    )
    return (
        f"A 2-D grid (rows and columns) is fastest in {first} of {len(filled)} cells in which "
        f"something fits, and within {CLOSE:.0%} of the fastest in {near}."
    )


def main(picture: Path | None) -> None:
    """Prints the maps, and draws them into a file if one is given."""
    maps = []
    for case in CASES:
        cells = map_of(case)
        maps.append((case, cells))
        print("\n".join([*lines_of(case, cells), "", wins(cells), ""]), flush=True)
    if picture is not None:
        plot(maps, picture)
