"""Compares loss curves in float32, bfloat16 and float16, with the same weights, text and steps.

    gridformer prepare python-stdlib --vocab-size 512 --out data/python-stdlib
    python -m benchmarks.precision --data data/python-stdlib --plot docs/results/precision.png

It trains a small GPT-2 with `gridformer train` for every type, seed and layout, prints Markdown,
and fails if a smoothed loss differs from float32's by more than docs/reference/precision.md allows.
float16 is slow on a CPU: about a minute a run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gridformer.train.metrics import read_metrics

HALVES = ("bfloat16", "float16")
WINDOW = 20  # steps averaged for one point of a smoothed curve
MODEL: dict[str, Any] = {
    "n_layers": 2,
    "hidden_size": 64,
    "ffn_size": 256,
    "n_heads": 4,
    "vocab_size": 512,
    "max_seq_len": 64,
}
TRAIN: dict[str, Any] = {
    "global_batch": 16,
    "lr": 1e-3,
    "warmup_steps": 20,
    "eval_every": 0,
    "eval_batches": 1,
    "save_every": 0,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {"scheme": "single"},
    "optimus 2x2": {"scheme": "optimus", "rows": 2, "cols": 2},
}


# in nats per token: see docs/reference/precision.md
BOUND = 0.003


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return means over WINDOW steps, one for each step at which a window begins."""
    return [sum(losses[i : i + WINDOW]) / WINDOW for i in range(len(losses) - WINDOW + 1)]


def largest_gap(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest difference of smoothed losses, in nats per token."""
    return max(abs(a - b) for a, b in zip(smoothed(losses), smoothed(reference), strict=True))


def main(
    data: Annotated[Path, typer.Option(help="A prepared folder.")] = Path("data/python-stdlib"),
    steps: Annotated[int, typer.Option(min=WINDOW)] = 200,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/bench/precision"),
    picture: Annotated[Path | None, typer.Option("--plot", help="PNG of the curves.")] = None,
) -> None:
    """Train, compare, print and plot. Only the first layout runs with every seed."""
    typer.echo("| layout | seed | type | last loss | skipped steps | gap |")
    typer.echo("| --- | ---: | --- | ---: | ---: | ---: |")
    worst = 0.0
    first: dict[str, list[float]] = {}
    for number, layout in enumerate(LAYOUTS):
        for seed in range(1, (1 if number else seeds) + 1):
            curves: dict[str, list[float]] = {}
            for dtype in ("float32", *HALVES):
                folder = out / f"{steps}-{number}-{seed}-{dtype}"
                lines = _train(LAYOUTS[layout], data, steps, seed, dtype, folder)
                curves[dtype] = [line["loss"] for line in lines]
                gap = largest_gap(curves[dtype], curves["float32"])
                worst = max(worst, gap)
                skipped = sum(line.get("skipped", 0) for line in lines)
                last = smoothed(curves[dtype])[-1]
                typer.echo(f"| {layout} | {seed} | {dtype} | {last:.4f} | {skipped} | {gap:.1e} |")
            first = first or curves
    if picture is not None:
        _plot(first, picture)
    if worst > BOUND:
        raise SystemExit(f"losses differ by {worst:.1e}; {BOUND} is allowed")


def _train(
    layout: dict[str, Any], data: Path, steps: int, seed: int, dtype: str, folder: Path
) -> list[dict[str, Any]]:
    """Return the metrics of every step. A finished run is not repeated."""
    layout = {"rows": 1, "cols": 1, **layout}
    train = {**TRAIN, "steps": steps, "seed": seed, "dtype": dtype}
    sections = {"model": MODEL, "layout": layout, "train": train, "data": {"path": data}}
    words = [f"{name}.{key}={value}" for name in sections for key, value in sections[name].items()]
    command = [sys.executable, "-m", "gridformer", "train", "demo", "--out", str(folder), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [line for line in read_metrics(folder) if "loss" in line]


def _plot(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (curve, rest) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    want = smoothed(curves["float32"])
    for number, (dtype, losses) in enumerate(curves.items()):
        found = smoothed(losses)
        steps = range(WINDOW, len(losses) + 1)
        # Widest first, so that overlapping curves all stay visible.
        curve.plot(steps, found, linewidth=5 - 2 * number, color=f"C{number}", label=dtype)
        if number:
            apart = [abs(a - b) for a, b in zip(found, want)]
            rest.plot(steps, apart, color=f"C{number}", label=dtype)
    curve.set(xlabel="step", ylabel="cross entropy (nats per token)", title="Loss, 20 steps' mean")
    rest.set(xlabel="step", yscale="log", title="Difference from float32")
    for axis in (curve, rest):
        axis.legend(frameon=False)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
