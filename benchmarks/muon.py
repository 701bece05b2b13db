"""Muon beside AdamW: the loss of a small run on real text, and the time of a step by layout.

    gridformer prepare python-stdlib --vocab-size 512 --out data/python-stdlib
    python -m benchmarks.muon --out docs/results/muon.md

It runs `gridformer train demo` on one process, with each optimizer and a few learning rates, and
draws the best run of each over steps and over seconds. Then it takes turns with both on layouts of
four processes, and predicts a large model's step. Nothing else should run meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.common.machine import describe_machine
from benchmarks.common.page import write_page
from gridformer.train.metrics import read_metrics

OPTIMIZERS = {"AdamW": "adamw", "Muon": "muon"}
RATES = ("3e-4", "1e-3", "3e-3", "1e-2")
ALONE = "rows=1 cols=1 scheme=single"
LAYOUTS = {
    "one process": ALONE,
    "Megatron 1x4": "rows=1 cols=4 scheme=megatron",
    "Optimus 2x2": "rows=2 cols=2 scheme=optimus",
    "ZeRO-1 over 4": f"{ALONE} dp=4 dp_mode=zero1",
    "FSDP over 4": f"{ALONE} dp=4 dp_mode=fsdp",
}
LARGE = ("llama-3.1-8b", "--cluster", "dgx-h100", "train.global_batch=64", "train.dtype=bfloat16")
LARGE_LAYOUTS = {
    "FSDP over 64": "dp=64 dp_mode=fsdp",
    "Megatron 1x8, sequence parallel, FSDP over 8": (
        "scheme=megatron cols=8 sequence_parallel=true dp=8 dp_mode=fsdp"
    ),
    "Megatron 2-D 4x2, FSDP over 8": "scheme=megatron_2d rows=4 cols=2 dp=8 dp_mode=fsdp",
}


def main(
    steps: Annotated[int, typer.Option(min=10)] = 150,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/bench/muon"),
    out: Annotated[Path | None, typer.Option(help="Page; a PNG is written beside it.")] = None,
) -> None:
    """Train, measure, predict, and write a page."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {
        name: {rate: _train(kind, rate, ALONE, steps, runs / f"{kind}-{rate}") for rate in RATES}
        for name, kind in OPTIMIZERS.items()
    }
    best = {name: min(each.values(), key=_last) for name, each in found.items()}
    losses = "\n".join(
        f"| {name} | " + " | ".join(f"{_last(each[rate]):.3f}" for rate in RATES) + " |"
        for name, each in found.items()
    )
    target = _last(best["AdamW"])
    reached = next((i + 1 for i, one in enumerate(_smooth(best["Muon"])) if one <= target), None)
    again = f"after {reached} of {steps} steps" if reached else "never"
    times = _measured(rounds, runs)
    adamw_s, muon_s = times["one process"]
    longer = muon_s / adamw_s
    when = f": after {reached * longer / steps:.2f} of the time that AdamW takes" if reached else ""
    machine = describe_machine("benchmarks.muon")
    parts = [
        "# Muon beside AdamW",
        f"Muon reaches the loss with which AdamW ends ({target:.3f}) {again}. Its step takes "
        f"{longer:.2f} times as long on one process here, with 2,048 tokens a step{when}. "
        "With more tokens a step it costs less (see below).",
        "{date}: {cpu}, {cores} cores, torch {torch}, {backend}, commit {commit}: "
        "`{command}`.".format(**machine),
        f"The model and text of `gridformer demo` (4M parameters, Python's standard library), "
        f"{steps} steps of 16 sequences of 128 tokens. A loss is the mean over the last 10 steps.",
        f"| loss with a learning rate of | {' | '.join(RATES)} |\n|---|{'---:|' * len(RATES)}\n"
        + losses,
    ]
    if out is not None:
        _plot(best, dict(zip(best, (adamw_s, muon_s))), out.with_suffix(".png"))
        parts.append(f"![Loss over steps and over seconds]({out.stem}.png)")
    parts += [
        "## Time of a step, measured",
        f"Medians of {rounds} runs of 20 steps each, in turns.",
        _table(times),
        "## Time of a step, predicted",
        "By `gridformer predict " + " ".join(LARGE) + " ...`, sequences of 8,192 tokens.",
        _table(_predicted()),
    ]
    write_page(parts, out)


def _train(kind: str, rate: str, layout: str, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Returns the metrics of every step. A finished run is not repeated."""
    settings = [f"layout.{word}" for word in layout.split()]
    settings += [f"train.optimizer={kind}", f"train.lr={rate}", f"train.steps={steps}"]
    settings += ["train.eval_every=0", "train.save_every=0", "data.path=data/python-stdlib"]
    _gridformer("train", "demo", *settings, "--out", str(folder))
    return [row for row in read_metrics(folder) if "loss" in row]


def _gridformer(*words: str) -> str:
    command = [sys.executable, "-m", "gridformer", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _smooth(rows: list[dict[str, Any]]) -> list[float]:
    """Returns the mean loss of the last 10 steps before each."""
    losses = [row["loss"] for row in rows]
    return [sum(losses[max(0, i - 9) : i + 1]) / min(10, i + 1) for i in range(len(losses))]


def _last(rows: list[dict[str, Any]]) -> float:
    return _smooth(rows)[-1]


def _measured(rounds: int, runs: Path) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for name, layout in LAYOUTS.items():
        each: dict[str, list[float]] = {kind: [] for kind in OPTIMIZERS.values()}
        for number in range(rounds):
            for kind in each:
                folder = runs / f"{name.replace(' ', '-')}-{kind}-{number}"
                rows = _train(kind, "3e-3", layout, 20, folder)
                each[kind].append(median(row["step_time_s"] for row in rows[2:]))
        times[name] = [median(one) for one in each.values()]
    return times


def _predicted() -> dict[str, list[float]]:
    def step_s(layout: str, kind: str) -> float:
        settings = [f"layout.{word}" for word in layout.split()]
        text = _gridformer("predict", *LARGE, *settings, f"train.optimizer={kind}", "--json")
        return float(json.loads(text)["step_s"])

    return {
        name: [step_s(layout, kind) for kind in OPTIMIZERS.values()]
        for name, layout in LARGE_LAYOUTS.items()
    }


def _table(times: dict[str, list[float]]) -> str:
    head = f"| layout | {', ms | '.join(OPTIMIZERS)}, ms | Muon / AdamW |\n|---|---:|---:|---:|\n"
    return head + "\n".join(
        f"| {name} | {a * 1e3:,.1f} | {b * 1e3:,.1f} | {b / a:.2f} |"
        for name, (a, b) in times.items()
    )


def _plot(best: dict[str, list[dict[str, Any]]], seconds: dict[str, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (over_steps, over_time) = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for name, rows in best.items():
        smooth = _smooth(rows)
        over_steps.plot(range(1, len(rows) + 1), smooth, label=name)
        over_time.plot([(i + 1) * seconds[name] for i in range(len(rows))], smooth, label=name)
    over_steps.set(xlabel="step", ylabel="loss, mean of 10 steps")
    over_time.set(xlabel="seconds, at the median time of a step")
    for axes in (over_steps, over_time):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    typer.run(main)
