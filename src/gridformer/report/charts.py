"""Which curves a page draws: the metrics of all runs, grouped into charts, with few enough points.

The script of the page draws them. It gets numbers and labels as JSON, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from gridformer.report.history import Mark, marks_of
from gridformer.report.reading import RunReading
from gridformer.train.metrics import spelled

MOST_POINTS = 1200  # of a curve; a screen is not wider
_AXIS_POINTS = 400


class Curves(NamedTuple):
    """A chart, and the metrics in it.

    Attributes:
        title: The title.
        unit: The unit of its values.
        keys: The names of the metrics.
        factor: By what the values of metrics.jsonl are multiplied.
        smooth: Whether the slider of the page smooths its curves.
        zero: Whether the vertical axis begins at 0.
    """

    title: str
    unit: str
    keys: tuple[str, ...]
    factor: float = 1.0
    smooth: bool = False
    zero: bool = False


_KNOWN = (
    Curves("Learning rate", "", ("lr",), zero=True),
    Curves("Gradient norm", "before clipping", ("grad_norm",), smooth=True),
    Curves("Speed", "tokens/s", ("tokens_per_s",), smooth=True, zero=True),
    Curves("Utilization (MFU)", "% of the peak", ("mfu", "hfu"), 100.0, smooth=True, zero=True),
    Curves(
        "Operations",
        "TFLOP/s of each process",
        ("model_tflops", "hardware_tflops"),
        smooth=True,
        zero=True,
    ),
    Curves("Time of a step", "seconds", ("step_time_s", "data_wait_s"), smooth=True, zero=True),
    Curves("Memory", "GiB at the peak of the fullest process", ("peak_memory_gib",), zero=True),
    Curves("Loss scale", "", ("loss_scale",)),
    Curves("Skipped steps", "since the run began", ("skipped",), zero=True),
    Curves("Saving", "seconds", ("save_s", "save_stall_s"), zero=True),
)
_NOT_DRAWN = {"tokens", "rollbacks"}
_NAMES = {
    "loss": "Training loss",
    "mfu": "MFU",
    "hfu": "HFU",
    "step_time_s": "All of it",
    "data_wait_s": "Waiting for data",
    "save_s": "Until a checkpoint is complete",
    "save_stall_s": "Training waits for it",
}
_LOSS, _VALIDATION = "loss", "val_loss"


def chart_list(runs: Sequence[RunReading]) -> list[Curves]:
    """Returns the charts that some runs have values for, the losses first."""
    keys = [*dict.fromkeys(key for run in runs for key in run.names)]
    of_sets = (f"{_VALIDATION}_", "test_loss_")
    validation = [key for key in keys if key == _VALIDATION or key.startswith(of_sets)]
    parts = [key for key in keys if key.startswith(f"{_LOSS}_") and key != "loss_scale"]
    losses = (*(key for key in keys if key == _LOSS), *validation)
    found = [Curves("Loss", _loss_unit(runs), losses, smooth=True)] if losses else []
    if parts:
        title = "Parts of the training loss"
        found.append(Curves(title, _loss_unit(runs), (*parts,), smooth=True))
    known = {*losses, *parts, *_NOT_DRAWN, *(key for chart in _KNOWN for key in chart.keys)}
    found += [Curves(words(key), "", (key,)) for key in keys if key not in known]
    utilized = "mfu" in keys
    for chart in _KNOWN:
        here = tuple(key for key in chart.keys if key in keys)
        if not here or (chart.title == "Operations" and utilized):
            continue  # utilization is the same curve in another unit
        if len(here) == 2 and all(run.series(here[0]) == run.series(here[1]) for run in runs):
            here = here[:1]  # nothing is recomputed
        found.append(chart._replace(keys=here))
    return found


def _loss_unit(runs: Sequence[RunReading]) -> str:
    squared = [run.config is not None and run.config.task == "regression" for run in runs]
    units = ["nats per target"] * (not all(squared)) + ["mean squared error"] * any(squared)
    return ", or ".join(units)


def words(key: str) -> str:
    """Returns the name of a metric as a heading: `val_exact_match` is `Validation exact match`."""
    if key in _NAMES:
        return _NAMES[key]
    group, _, rest = key.partition("_")
    text = spelled(f"validation_{rest}" if group == "val" else key)
    return text[:1].upper() + text[1:]


def charts_as_json(runs: Sequence[RunReading]) -> dict[str, Any]:
    """Returns what the script draws: charts with curves, axes and marks of each run."""
    charts = []
    for chart in chart_list(runs):
        curves = []
        for number, run in enumerate(runs):
            for key in chart.keys:
                steps, values = run.series(key)
                if not steps:
                    continue
                kept = decimated(values, MOST_POINTS)
                curves.append(
                    {
                        "run": number,
                        "key": key,
                        "label": words(key),
                        "sparse": key.startswith(("val_", "test_"))
                        or len(steps) < 0.5 * len(run.metrics),
                        "x": [steps[i] for i in kept],
                        "y": [_short(chart.factor * values[i]) for i in kept],
                    }
                )
        about = {"title": chart.title, "unit": chart.unit, "smooth": chart.smooth}
        charts.append({**about, "zero": chart.zero, "curves": curves})
    return {
        "runs": [
            {"label": run.label, "axes": _axes(run), "marks": [_mark(m) for m in marks_of(run)]}
            for run in runs
        ],
        "charts": charts,
    }


def _mark(mark: Mark) -> dict[str, Any]:
    return {"step": mark.step, "kind": mark.kind, "text": mark.text}


def _axes(run: RunReading) -> dict[str, list[float]]:
    """Returns tokens and hours at some steps, between which the script draws lines."""
    lines = run.metrics
    n = min(len(lines), _AXIS_POINTS)
    kept = [i * (len(lines) - 1) // max(1, n - 1) for i in range(n)]
    tokens = [*accumulate((_number(line, "tokens") for line in lines), max)]
    hours = [*accumulate(_number(line, "step_time_s") / 3600 for line in lines)]
    return {
        "step": [lines[i]["step"] for i in kept],
        "tokens": [tokens[i] for i in kept],
        "hours": [_short(hours[i]) for i in kept],
    }


def _number(line: dict[str, Any], key: str) -> float:
    value = line.get(key)
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e300 else 0.0


def decimated(values: Sequence[float], most: int) -> list[int]:
    """Returns the places of a limited number of values that show the same curve.

    Of each of equal parts it takes the smallest and the largest value, so no spike is lost, and it
    takes the first and the last of all.

    Args:
        values: The values of a curve.
        most: The most values that are kept.
    """
    n = len(values)
    if n <= most:
        return [*range(n)]
    parts = (most - 2) // 2
    kept = {0, n - 1}
    for part in range(parts):
        places = range(part * n // parts, (part + 1) * n // parts)
        kept |= {min(places, key=values.__getitem__), max(places, key=values.__getitem__)}
    return sorted(kept)


def _short(value: float) -> float:
    """Returns a value with six digits, which a curve on a screen does not need."""
    return float(f"{value:.6g}")
