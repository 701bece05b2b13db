"""Loss against wall clock under SUPER's layouts, as Jain et al. 2021 show it.

    python -m benchmarks.published.loss --out docs/results/published-super-loss.md \
        --plot docs/results/published-super-loss.png

As in the paper a global batch has 128 sequences, and 128 iterations count after 32 to warm up.
Losses come from real training of a small model here, on the real layouts with four gloo processes.
Seconds are those that `predict` says of a step of the paper's model on Lassen: nothing ran there.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from benchmarks.common.machine import command_line, describe_machine
from benchmarks.common.page import write_page
from benchmarks.published.super import LASSEN, PAPER, replicas, run_of, seconds, sub_graphs
from gridformer.cluster.file import load_cluster
from gridformer.train.metrics import read_metrics

MODEL = "transformer-base"  # whose seconds are predicted
DEVICES, BATCH, WARM_UP, COUNTED = 4, 128, 32, 128
LAYOUTS: dict[str, dict[str, Any]] = {
    "data parallel": replicas(DEVICES),
    "2-way D&SP": sub_graphs(2, DEVICES // 2),
    "4-way D&SP": sub_graphs(4),
    "4-way cSub": sub_graphs(4, common="first"),
}
SMALL = {
    "family": "transformer",
    "n_layers": 1,
    "hidden_size": 64,
    "n_heads": 4,
    "max_seq_len": 24,
    "dropout": 0.0,
}
KINDS = ("one product", "one by one")  # how heads are computed; see benchmarks.published.super
TOLERANCE = 1e-4  # of losses, relative to data parallelism's


@dataclass(frozen=True)
class Curve:
    """A layout: its losses, and the predicted seconds of a step with heads of each kind."""

    name: str
    losses: list[float]
    step_s: dict[str, float]

    def reaches(self, loss: float, kind: str) -> float:
        """Returns the seconds after the warm-up until the mean of eight losses is this low."""
        for i in range(WARM_UP, len(self.losses)):
            if sum(self.losses[i - 7 : i + 1]) / 8 <= loss:
                return (i + 1 - WARM_UP) * self.step_s[kind]
        return float("nan")


def write_pairs(folder: Path, number: int = 8000) -> tuple[Path, Path]:
    """Writes made-up sentences and their translations, word by word, always the same ones."""
    draw = random.Random(5)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 6))) for _ in range(60)]
    mapped = {word: word[::-1].upper() for word in words}
    first, second = folder / "train.xx", folder / "train.yy"
    with first.open("w", encoding="utf-8") as a, second.open("w", encoding="utf-8") as b:
        for _ in range(number):
            sentence = draw.choices(words, weights=range(1, 61), k=draw.randint(3, 6))
            print(*sentence, file=a)
            print(*(mapped[word] for word in sentence), file=b)
    return first, second


def gridformer(*words: str) -> None:
    """Runs the command line.

    Raises:
        CalledProcessError: It failed.
    """
    subprocess.run([sys.executable, "-m", "gridformer", *words], check=True, stdout=sys.stderr)


def losses(layout: Mapping[str, Any], data: Path, folder: Path, steps: int) -> list[float]:
    """Trains the small model on real processes, and returns the loss of each step."""
    raw = {
        "name": "loss",
        "model": SMALL,
        "layout": dict(layout),
        "data": {"path": str(data)},
        "train": {
            "steps": steps,
            "global_batch": BATCH,
            "lr": 3e-3,
            "warmup_steps": WARM_UP,
            # In float32 such a short training at a high rate amplifies rounding to 5% of a loss.
            "dtype": "float64",
            "device": "cpu",
            "save_every": steps,
            "eval_every": 0,
        },
    }
    folder.mkdir()
    run_file = folder / "run.yaml"
    run_file.write_text(yaml.safe_dump(raw), encoding="utf-8")
    gridformer("train", str(run_file), "--out", str(folder / "run"))
    found = read_metrics(folder / "run")
    return [float(line["loss"]) for line in found if "loss" in line]


def curves(steps: int = WARM_UP + COUNTED) -> list[Curve]:
    """Trains and predicts all layouts."""
    cluster, found = load_cluster(LASSEN), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        first, second = write_pairs(folder)
        data = folder / "pairs"
        gridformer("prepare", "--pair-files", str(first), str(second), "--vocab-size", "400",
                   "--out", str(data))  # fmt: skip
        for number, (name, layout) in enumerate(LAYOUTS.items()):
            lost = losses(layout, data, folder / f"{number}", steps)
            run = run_of(MODEL, layout, BATCH)
            step_s = {kind: seconds(run, cluster, kind == KINDS[1]) for kind in KINDS}
            typer.echo(f"{name}: {lost[0]:.3f} to {lost[-1]:.3f}, {step_s}", err=True)
            found.append(Curve(name, lost, step_s))
    return found


def apart(curve: Curve, reference: Curve) -> float:
    """Returns the largest relative difference of the losses of two layouts.

    Raises:
        ValueError: They differ by more than rounding explains.
    """
    pairs = zip(curve.losses, reference.losses, strict=True)
    worst = max(abs(a - b) / abs(b) for a, b in pairs)
    if worst > TOLERANCE:
        raise ValueError(f"the losses of {curve.name} differ by {worst:.1e} from those of others")
    return worst


def curve_lines(found: list[Curve]) -> list[str]:
    reference = found[0]
    target = sum(reference.losses[-8:]) / 8
    lines = [
        "| layout | loss after the warm-up | at the end | furthest from data parallelism | "
        + " | ".join(f"s a step, {kind} | s to the last loss, {kind}" for kind in KINDS)
        + " |",
        "|---|---:|---:|---:|" + "---:|---:|" * len(KINDS),
    ]
    for one in found:
        cells = [f"{one.losses[WARM_UP - 1]:.4f}", f"{one.losses[-1]:.4f}",
                 f"{apart(one, reference):.0e}"]  # fmt: skip
        for kind in KINDS:
            reached = one.reaches(target * (1 + TOLERANCE), kind)
            cells += [f"{one.step_s[kind]:.3f}", f"{reached:.1f}"]
        lines.append(f"| {one.name} | {' | '.join(cells)} |")
    return lines


def plot(found: list[Curve], path: Path) -> None:
    """Draws the losses over the predicted seconds, with heads of each kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for axis, kind in zip(axes, KINDS):
        for one in found:
            counted = one.losses[WARM_UP:]
            times = [(i + 1) * one.step_s[kind] for i in range(len(counted))]
            axis.plot(times, counted, label=one.name, linewidth=1)
        axis.set_title(f"heads in {kind}" if kind == KINDS[0] else f"heads {kind}")
        axis.set_xlabel("predicted seconds after the warm-up")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("loss")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    out: Annotated[
        Path | None, typer.Option(help="The Markdown file to write; else it is printed.")
    ] = None,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", help="The figure to write, beside the page.")
    ] = None,
) -> None:
    """Train the layouts here, predict their steps on Lassen, and show loss against wall clock."""
    about = describe_machine("benchmarks.published.loss")
    found = curves()
    parts = [
        "# SUPER: loss against wall clock",
        f"{about['date']}, commit {about['commit'] or 'unknown'}: "
        f"`{command_line('benchmarks.published.loss')}`. Losses were measured here with torch "
        f"{about['torch']} and gloo; seconds are predicted, nothing ran on Lassen. "
        f"After {PAPER}, which has such a figure, but no table of its numbers.",
        _ABOUT,
        "\n".join(curve_lines(found)),
        *([f"![Loss over predicted seconds]({plot_to.name})"] if plot_to else []),
        _SHOWN,
    ]
    if plot_to is not None:
        plot(found, plot_to)
    write_page(parts, out)


_ABOUT = f"""\
A global batch of {BATCH} sequences on {DEVICES} devices, {WARM_UP} iterations to warm up and
{COUNTED} that count. **Losses** are those of real training: an encoder-decoder with
{SMALL["n_layers"]} + {SMALL["n_layers"]} layers, h={SMALL["hidden_size"]}, on made-up pairs of
sentences, in float64, on each layout with {DEVICES} real processes. **Seconds** are what is
predicted for a step of the original Transformer (`{MODEL}`, float32) with this batch on `{LASSEN}`,
times the iterations: with all heads of a device in one product, as in gridformer, and with heads
launched one by one, as in SUPER's code (simulated, see [published-super.md](published-super.md)).
The command fails if a loss differs from data parallelism's by more than {TOLERANCE:g} of it. "The
last loss" is the mean of the last eight of data parallelism."""
_SHOWN = """\
All layouts compute the same, so their losses are the same by iteration, and only the seconds of a
step decide which curve falls first."""


if __name__ == "__main__":
    typer.run(main)
