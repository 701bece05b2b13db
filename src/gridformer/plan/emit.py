"""Writes a layout that was found as a run file for `gridformer train`."""

from __future__ import annotations

from pathlib import Path

import yaml

from gridformer.config import RunConfig
from gridformer.plan.search import Found

NO_DATA = "SET-ME"  # the data.path of a run made from a model's name alone


def write_run(found: Found, path: Path, how: str) -> None:
    """Writes a run file that `gridformer train` accepts as it is.

    It holds what differs from the defaults, and a comment that says what was predicted.

    Args:
        found: The layout with its settings.
        path: The file, whose folder is created if needed.
        how: The command that makes it, quoted for the shell.
    """
    prediction = found.prediction
    lines = [f"# {found.name}, written by: {how}".replace("\n", "\n# ")]
    if prediction is not None:
        lines.append(
            f"# Predicted: {prediction.step_s:.4g} s a step, {prediction.peak_gib:.1f} of "
            f"{prediction.limit_gib:.1f} GiB, {prediction.model_tflops_per_device:.4g} TFLOP/s a "
            "device."
        )
    if run_has_no_data(found.run):
        lines.append(f"# Set data.path={NO_DATA} to a folder that `gridformer prepare` wrote.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n" + run_as_yaml(found.run), encoding="utf-8")


def run_has_no_data(run: RunConfig) -> bool:
    """Whether a run was made from a model's name alone."""
    return run.data.path == Path() and not run.data.sources


def run_as_yaml(run: RunConfig) -> str:
    """Returns a run as YAML without the values that are defaults; it reads back as an equal run."""
    values = run.model_dump(mode="json", exclude_defaults=True)
    if run_has_no_data(run):
        # The path of a run without data is the current folder, which has no tokens.
        values["data"] = {**values["data"], "path": NO_DATA}
    return yaml.safe_dump({"name": run.name, **values}, sort_keys=False)
