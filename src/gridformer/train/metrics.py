"""metrics.jsonl, events.jsonl and loss.png of a run, and how metrics are named and shown."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gridformer.config import FINE_TUNING
from gridformer.train.callbacks import Callback, RunEnd, RunStart, Saved
from gridformer.utils.files import read_text, writing
from gridformer.utils.units import GIB

if TYPE_CHECKING:
    from gridformer.config import RunConfig

METRICS, EVENTS_FILE = "metrics.jsonl", "events.jsonl"
PLOT, TENSORBOARD = "loss.png", "tensorboard"
MOST_BYTES = 8 * GIB  # of metrics.jsonl: a million steps have a third of a GiB
_SHARES = 512  # of experts in a line, on average
_NAMES = ("BLEU", "F1", "Matthews", "Pearson", "Spearman")
_SPELLED = {name.lower(): name for name in _NAMES}


class MetricsFile(Callback):
    """Writes one JSON object per step to metrics.jsonl. Rank 0 only.

    A run that died after its last checkpoint leaves lines of later steps. Resuming removes them,
    because those steps run again, with the same result.
    """

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        self.path = run_dir / METRICS
        self._open(resume_step)

    def _open(self, resume_step: int) -> None:
        run_dir = self.path.parent
        kept = [m for m in read_metrics(run_dir) if m["step"] <= resume_step] if resume_step else []
        swap = self.path.with_suffix(".tmp")
        text = "".join(json.dumps(line) + "\n" for line in kept)
        with writing(self.path, len(text)):
            swap.write_text(text, encoding="utf-8")
            os.replace(swap, self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """Appends the metrics of one step and flushes them."""
        line = json.dumps(metrics) + "\n"
        with writing(self.path, len(line)):
            self._file.write(line)
            self._file.flush()

    def on_diverged(self, step: int, why: str, back_to: int | None) -> None:
        """Removes the lines of steps that run again."""
        if back_to is not None:
            self._file.close()
            self._open(back_to)

    def close(self) -> None:
        with writing(self.path):
            self._file.close()


def expert_metrics(counts: Sequence[Sequence[int]], step: int) -> dict[str, Any]:
    """Returns the metrics of the tokens of each expert [L, E] in a step, counted from 0.

    The shares of all experts are among them in every step, or in as many as keep lines short.
    """
    if not counts:
        return {}
    n_experts, totals = len(counts[0]), [max(1, sum(layer)) for layer in counts]
    metrics: dict[str, Any] = {
        "experts_fullest": max(max(layer) * n_experts / n for layer, n in zip(counts, totals)),
        "experts_idle": fmean(layer.count(0) / n_experts for layer in counts),
    }
    if step % -(-len(counts) * n_experts // _SHARES) == 0:
        shares = [[round(one / n, 5) for one in layer] for layer, n in zip(counts, totals)]
        metrics["experts"] = shares
    return metrics


class Events(Callback):
    """Writes events.jsonl: when a run started, saved, diverged and ended.

    metrics.jsonl has one line for each step, as if the run had never been interrupted. A run that
    is resumed appends to this file. The run goes on if it cannot be written, as on a full disk.
    """

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock = run_dir / EVENTS_FILE, clock

    def on_start(self, start: RunStart) -> None:
        about = {"layout": start.layout, "devices": start.devices, "device": start.device}
        self._write("start", start.step, about)

    def on_saved(self, saved: Saved) -> None:
        if saved.failure:
            self._write("not_saved", saved.step, {"why": saved.failure})
            return
        about = {"bytes": saved.n_bytes, "seconds": saved.seconds, "stalled_s": saved.stalled_s}
        self._write("saved", saved.step, about)

    def on_diverged(self, step: int, why: str, back_to: int | None) -> None:
        self._write("diverged", step, {"why": why, "back_to": back_to})

    def on_end(self, end: RunEnd) -> None:
        if end.how == "failed":
            self._write("failed", end.step, {"why": end.why})
        else:
            self._write("end", end.step, {"stopped": end.how == "stopped"})

    def _write(self, event: str, step: int, about: dict[str, Any]) -> None:
        line = json.dumps({"event": event, "time": self._clock(), "step": step, **about})
        with suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def lacks_evaluation(run_dir: Path, step: int) -> bool:
    """Returns whether a run has written the metrics of a step, but not of an evaluation there."""
    lines = [line for line in read_metrics(run_dir) if line["step"] == step]
    return bool(lines) and not any("val_loss" in line for line in lines)


def grouped(name: str) -> str:
    """Returns the name of a metric as `train/loss`, `val/loss` or `test/loss_news`."""
    group, _, rest = name.partition("_")
    return f"{group}/{rest}" if group in ("val", "test") else f"train/{name}"


def spelled(key: str) -> str:
    """Returns the words of a metric's name: `val_f1_web` is `val F1 web`."""
    return " ".join(_SPELLED.get(word, word) for word in key.split("_"))


def loss_unit(run: RunConfig) -> str:
    """Returns the name of a run's loss, and its unit."""
    if run.task == "regression":
        return "mean squared error"
    if run.task in FINE_TUNING:
        return "cross entropy (nats per example)"
    if not run.model.only_token_head:
        return "sum of cross entropies (nats)"
    return "cross entropy (nats per token)"


def token_perplexity(run: RunConfig, metrics: Mapping[str, float]) -> float | None:
    """Returns the perplexity of the validation set's tokens; None for a task without tokens."""
    if run.task in FINE_TUNING:
        return None
    return perplexity(metrics.get("val_loss_tokens", metrics["val_loss"]))


def perplexity(loss: float) -> float:
    """Returns exp(loss), limited so that the loss of a diverged run does not overflow."""
    return math.exp(min(loss, 700.0))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Returns all complete lines of a run's metrics.jsonl, without lines truncated by a crash."""
    return complete_lines(run_dir / METRICS)


def complete_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects in a file of JSON lines, without lines truncated by a crash."""
    if not path.exists():
        return []
    objects = []
    for line in read_text(path, MOST_BYTES).split("\n"):
        with suppress(json.JSONDecodeError):
            objects.append(json.loads(line))
    return objects


def plot_loss(run_dir: Path, title: str, run: RunConfig) -> None:
    """Plots training and validation loss over steps into the run directory, if it has metrics."""
    metrics = read_metrics(run_dir)
    train = [(m["step"], m["loss"]) for m in metrics if "loss" in m]
    val = [(m["step"], m["val_loss"]) for m in metrics if "val_loss" in m]
    if not train:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps, losses = zip(*train)
    axes.plot(steps, losses, color="#9ec5e8", linewidth=1, label="training, each step")
    weight = 1 - 1 / max(1, min(50, len(losses) / 30))
    axes.plot(
        steps, smoothed(losses, weight), color="#1f6fb4", linewidth=2, label="training, smoothed"
    )
    if val:
        axes.plot(*zip(*val), color="#d1495b", marker="o", markersize=5, label="validation")
        last = [m for m in metrics if "val_loss" in m][-1]
        loss, words = last["val_loss"], token_perplexity(run, last)
        shown = ",.1f" if words is None or words < 1e9 else ".3g"
        # Outside the axes, so that the text covers no curve.
        axes.annotate(
            f"{loss:.2f}" + ("" if words is None else f"\nperplexity\n{words:{shown}}"),
            (1.01, loss),
            xycoords=("axes fraction", "data"),
            va="center",
            color="#d1495b",
            annotation_clip=False,
        )
    axes.set(xlabel="step", ylabel=loss_unit(run), title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path = run_dir / PLOT
    with writing(path):
        figure.savefig(path, dpi=130)
    plt.close(figure)


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Returns an exponential moving average with bias correction; `weight` is that of the past."""
    averages, total, norm = [], 0.0, 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        averages.append(total / norm)
    return averages


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings by dotted key."""
    settings: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            settings |= flat(value, f"{prefix}{key}.")
        else:
            settings[f"{prefix}{key}"] = value
    return settings


def is_number(value: object) -> bool:
    """Returns whether a value is a finite number; `True` is none."""
    try:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer that is larger than any float
        return False
