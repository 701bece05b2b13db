"""Writes a layout that was found as a run file for `gridformer train`."""

from __future__ import annotations

from pathlib import Path

import yaml

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import choices_of
from gridformer.plan.analytic import estimate
from gridformer.plan.predict import predict
from gridformer.plan.search import Found, Predict

NO_DATA = "SET-ME"  # the data.path of a run made from a model's name alone
GAIN = 0.995  # a step with choices for the cluster must take less than this part of that without


def with_cluster(found: Found, cluster: Cluster, name: str, predictor: Predict = predict) -> Found:
    """Returns a layout with `layout.cluster` if it fits and is predicted to be faster with it.

    Args:
        found: The layout, which was traced.
        cluster: The machine.
        name: The cluster's name or file, as `layout.cluster` takes it.
        predictor: Predicts a run on a cluster.
    """
    layout = found.run.layout.model_copy(update={"cluster": name})
    run = found.run.model_copy(update={"layout": layout})
    if found.prediction is None or choices_of(run).products == choices_of(found.run).products:
        return found
    prediction = predictor(run, cluster)
    if not prediction.fits or prediction.step_s >= GAIN * found.prediction.step_s:
        return found
    return Found(run, estimate(run, cluster), prediction)


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
