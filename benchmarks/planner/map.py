"""Which kind of layout wins where: `gridformer plan` over clusters, models, devices and lengths.

    python -m benchmarks.planner map --cells FILE --plot docs/results/planner-map.png

In each cell the search of `gridformer plan` composes layouts of every kind from records of the real
code, and the fastest of each kind that fits counts. It prints Markdown. Cells are appended to FILE
as they are found, and those that it has are not searched again.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from gridformer.cluster.file import load_cluster
from gridformer.config import parse_run
from gridformer.plan.predict import predict
from gridformer.plan.search import PlannedLayout, Search, sharding
from gridformer.plan.trace_candidates import Tracing

CLOSE = 0.01  # what differs by less counts as equally fast
LIMIT_S = 60.0  # seconds of a processor for a cell, after which no trace begins
OF_EACH = 2  # layouts of a kind that the search traces, and the fastest of which counts
TRIES = 3  # layouts of a kind that the search has not traced
FEW, MANY = 2048, 16384  # tokens of a step for each device

# Kinds of layouts, with their color in the figure. Every kind may have a pipeline and replicas of
# any mode, FSDP among them. Rows alone move what FSDP moves.
KINDS = {
    "data parallel": "#9ecae1",
    "Megatron": "#3182bd",
    "rows alone": "#fdd0a2",
    "2-D grid": "#e6550d",
    "sub-graph": "#c7e9c0",
    "nothing fits": "#eeeeee",
}
LONG = (4096, 32768, 131072)
H100, FRONTERA, NVL72, ETHERNET = "dgx-h100", "frontera-rtx5000", "gb200-nvl72", "l40s-ethernet"


@dataclass(frozen=True)
class Place:
    """A cell: so many devices of a cluster, and so many sequences of a length in a step."""

    cluster: str
    model: str
    devices: int
    seq_len: int
    sequences: int


@dataclass(frozen=True)
class Found:
    """The fastest layout of a kind in a cell: its settings, seconds of a step, and memory."""

    name: str
    step_s: float
    peak_gib: float


Cell = dict[str, Found]  # by kind, fastest first


def places() -> list[Place]:
    """Returns all cells; cells of one figure follow each other."""
    cases = [
        *((H100, model, (8, 64, 512, 2048), LONG) for model in ("llama-3.1-8b", "llama-3.1-70b")),
        (H100, "llama-3.1-405b", (512, 2048), LONG),
        (H100, "megatron-8.3b", (8, 64, 512), (1024,)),
        (H100, "gpt-175b", (512, 2048), (2048,)),
        *((NVL72, model, (64, 576), LONG) for model in ("llama-3.1-8b", "llama-3.1-70b")),
        (NVL72, "llama-3.1-405b", (64, 576), LONG),
        (ETHERNET, "llama-3.1-8b", (8, 64, 512), LONG),
        (FRONTERA, "megatron-8.3b", (64, 256), (1024,)),
        (FRONTERA, "llama-3.1-8b", (64, 256), (4096, 32768)),
    ]
    every = (
        Place(cluster, model, n, length, max(1, tokens * n // length))
        for cluster, model, devices, lengths in cases
        for n in devices
        for length in lengths
        for tokens in (FEW, MANY)
    )
    return [*dict.fromkeys(every)]


def cell_of(place: Place) -> Cell:
    """Returns the fastest layout of each kind that fits, fastest first."""
    cluster = load_cluster(place.cluster)
    settings = [
        f"train.dtype={cluster.fastest_dtype}",
        f"train.global_batch={place.sequences}",
        f"data.seq_len={place.seq_len}",
        "train.compile=false",
    ]
    run = parse_run({"model": place.model, "data": {"path": "."}}, settings)
    tracing = Tracing(Search(run, cluster, place.devices, named=place.cluster), 1, of_each=OF_EACH)
    tracing.run(LIMIT_S)
    best: dict[str, PlannedLayout] = {}
    for one in tracing.result.layouts:
        best.setdefault(sharding(one.run.layout), one)
    # The search traces few pipelines, of whatever kind. For the other kinds that have only
    # pipelines here, what is fastest by estimate is traced.
    tried = Counter[str]()
    for one in sorted(tracing.queue.waiting, key=lambda one: one.step_s):
        kind = sharding(one.run.layout)
        if kind not in best and tried[kind] < TRIES:
            tried[kind] += 1
            prediction = predict(one.run, cluster)
            if prediction.fits:
                best[kind] = PlannedLayout(one.run, one.estimate, prediction)
    found = sorted(best.items(), key=lambda item: item[1].step_s)
    return {kind: Found(one.name, one.step_s, one.peak_gib) for kind, one in found}


def cells_of(wanted: Sequence[Place], path: Path) -> dict[Place, Cell]:
    """Returns the cells of places, from the file or searched and added to it."""
    cells: dict[Place, Cell] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            saved = json.loads(line)
            cell = {kind: Found(**found) for kind, found in saved["cell"].items()}
            cells[Place(**saved["place"])] = cell
    for place in wanted:
        if place not in cells:
            with ProcessPoolExecutor(1) as pool:  # whose memory is freed
                cell = cells[place] = pool.submit(cell_of, place).result()
            found = {kind: asdict(one) for kind, one in cell.items()}
            with path.open("a") as file:
                file.write(json.dumps({"place": asdict(place), "cell": found}) + "\n")
            print(place, next(iter(cell), "nothing fits"), file=sys.stderr, flush=True)
    return {place: cells[place] for place in wanted}


def lines_of(cells: Iterable[tuple[Place, Cell]]) -> list[str]:
    """Returns the table of a figure: the fastest layout, and the others' times relative to it."""
    lines = [
        "| devices | sequences | fastest | s a step | the best of other kinds, relative to it |",
        "|---:|---:|---|---:|---|",
    ]
    for place, cell in cells:
        batch = f"{place.sequences:,} x {place.seq_len:,}"
        if not cell:
            lines.append(f"| {place.devices} | {batch} | nothing fits | | |")
            continue
        (kind, first), *others = cell.items()
        rest = ", ".join(
            f"{kind} {one.step_s / first.step_s:.2f} ({one.name})" for kind, one in others
        )
        fastest = f"{kind}: {first.name}"
        lines.append(f"| {place.devices} | {batch} | {fastest} | {first.step_s:.3g} | {rest} |")
    return lines


def wins(cells: Iterable[Cell]) -> str:
    """Says in how many cells grids are the fastest, or as fast as the fastest."""
    filled = [cell for cell in cells if cell]
    first = sum(next(iter(cell)) == "2-D grid" for cell in filled)
    rows = sum(next(iter(cell)) == "rows alone" for cell in filled)
    near = sum(_behind(cell) <= CLOSE for cell in filled)
    return (
        f"Of {len(filled)} cells in which something fits, a 2-D grid is the fastest in {first} and "
        f"rows alone in {rows}; a grid of either kind is within {CLOSE:.0%} of the fastest in "
        f"{near}."
    )


def _behind(cell: Cell) -> float:
    """Returns how much more time than the fastest the best grid takes, as a fraction."""
    grids = [cell[kind].step_s for kind in ("2-D grid", "rows alone") if kind in cell]
    return min(grids, default=float("inf")) / next(iter(cell.values())).step_s - 1


def plot(figures: Sequence[tuple[str, dict[Place, Cell]]], path: Path) -> None:
    """Draws a map for each model on a cluster: the fastest kind, and what a grid takes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch, Rectangle

    columns = 3
    n_lines = -(-len(figures) // columns)
    figure, axes = plt.subplots(n_lines, columns, figsize=(16, 4.4 * n_lines), squeeze=False)
    for axis in axes.flat[len(figures) :]:
        axis.axis("off")
    for axis, (title, cells) in zip(axes.flat, figures):
        devices = [*dict.fromkeys(place.devices for place in cells)]
        batches = [*dict.fromkeys(_batch(place) for place in cells)]
        for place, cell in cells.items():
            x, y = devices.index(place.devices), batches.index(_batch(place))
            color = KINDS[next(iter(cell), "nothing fits")]
            axis.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white"))
            axis.text(x + 0.5, y + 0.5, _label(cell), ha="center", va="center", fontsize=6.5)
        axis.set(title=title, xlim=(0, len(devices)), ylim=(0, len(batches)))
        axis.set_xticks([i + 0.5 for i in range(len(devices))], [f"{n:,} devices" for n in devices])
        axis.set_yticks([i + 0.5 for i in range(len(batches))], batches)
    handles = [Patch(color=color, label=kind) for kind, color in KINDS.items()]
    figure.legend(handles=handles, loc="lower center", ncol=len(handles), fontsize=9)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=110)


def _batch(place: Place) -> str:
    few = place.sequences == max(1, FEW * place.devices // place.seq_len)
    return f"{place.seq_len // 1024}k, {'few' if few else 'many'}"


def _label(cell: Cell) -> str:
    if not cell:
        return ""
    first = next(iter(cell.values())).name.replace(" over the sequence", ", over s")
    first = first.replace(", sequence parallel", "").replace(", interleaved", "")
    first = first.replace(", ", "\n")
    behind = _behind(cell)
    if behind == 0:
        return first
    return f"{first}\n" + (f"grid: {1 + behind:.2f}" if behind < float("inf") else "no grid fits")


def main(path: Path, picture: Path | None, words: Sequence[str]) -> None:
    """Prints the maps of models on clusters that have one of the words, and draws them."""
    wanted = [
        place
        for place in places()
        if not words or any(word in (place.cluster, place.model) for word in words)
    ]
    cells = cells_of(wanted, path)
    figures = []
    for (cluster, model), some in groupby(cells, lambda place: (place.cluster, place.model)):
        title = f"{model} on {cluster}, {load_cluster(cluster).fastest_dtype}"
        figures.append((title, {place: cells[place] for place in some}))
    print(wins(cells.values()))
    for title, one in figures:
        print("\n".join(["", f"## {title}", "", *lines_of(one.items())]))
    if picture is not None:
        plot(figures, picture)
