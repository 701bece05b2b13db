r"""Compares loss curves of data parallelism, D&SP, D&SP-cSub and one process over 50 equal steps.

    python -m benchmarks.precision.loss_curves --data data/python-stdlib \
        --plot docs/results/subgraph-loss.png

This is what SUPER's last figure shows for the same global batch (Jain et al. 2021, figure 17): the
curves coincide. It runs `gridformer train demo` with dropout for each layout, prints Markdown, and
fails if a loss differs from one process's by more than 1e-4, relative.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from gridformer.train.metrics import read_metrics

LAYOUTS = {
    "one process": "scheme=single",
    "data parallel, 4 processes": "scheme=single dp=4",
    "D&SP, g=4": "scheme=subgraph branches=4",
    "D&SP, g=2 x 2": "scheme=subgraph branches=2 dp=2",
    "D&SP-cSub, g=4": "scheme=subgraph branches=4 common=first",
    "D&SP-cSub, g=2 x 2, slices": "scheme=subgraph branches=2 dp=2 common=first attention=outside",
}
TOLERANCE = 1e-4


def main(
    data: Annotated[Path, typer.Option(help="A prepared folder.")] = Path("data/python-stdlib"),
    steps: Annotated[int, typer.Option(min=2)] = 50,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/bench/loss-curves"),
    picture: Annotated[Path | None, typer.Option("--plot", help="PNG of the curves.")] = None,
) -> None:
    """Train under every layout, compare, print and plot."""
    losses = {
        name: _train(layout, data, steps, out / f"{steps}-{number}")
        for number, (name, layout) in enumerate(LAYOUTS.items())
    }
    want = losses["one process"]
    typer.echo("| layout | first loss | last loss | largest relative difference |")
    typer.echo("| --- | ---: | ---: | ---: |")
    worst = 0.0
    for name, found in losses.items():
        difference = max(abs(a / b - 1) for a, b in zip(found, want, strict=True))
        worst = max(worst, difference)
        typer.echo(f"| {name} | {found[0]:.6f} | {found[-1]:.6f} | {difference:.1e} |")
    if picture is not None:
        _plot(losses, picture)
    if worst > TOLERANCE:
        raise SystemExit(f"loss curves differ by {worst:.1e}, more than the allowed {TOLERANCE}")


def _train(layout: str, data: Path, steps: int, folder: Path) -> list[float]:
    """Return the loss of every step. A finished run is not repeated."""
    overrides = [f"layout.{word}" for word in f"rows=1 cols=1 {layout}".split()]
    overrides += [f"train.steps={steps}", "train.eval_every=0", "train.save_every=0"]
    overrides += ["train.eval_batches=1", f"data.path={data}", "model.dropout=0.1"]
    command = [sys.executable, "-m", "gridformer", "train", "demo", "--out", str(folder)]
    subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL)
    return [line["loss"] for line in read_metrics(folder) if "loss" in line]


def _plot(losses: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (curve, rest) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    want = losses["one process"]
    steps = range(1, len(want) + 1)
    for number, (name, found) in enumerate(losses.items()):
        # Widest first, so that overlapping curves all stay visible.
        width = 1 + 1.3 * (len(losses) - 1 - number)
        curve.plot(steps, found, linewidth=width, label=name)
        if number:
            difference = [abs(a / b - 1) or float("nan") for a, b in zip(found, want)]
            rest.plot(steps, difference, ".", markersize=4, color=f"C{number}", label=name)
    curve.set(xlabel="step", ylabel="cross entropy (nats per token)", title="Loss")
    curve.legend(frameon=False, fontsize=8)
    rest.set(xlabel="step", yscale="log", title="Relative difference from one process")
    for axis in (curve, rest):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
