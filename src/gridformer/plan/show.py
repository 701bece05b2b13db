"""Prints a prediction."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.parallel.registry import describe_layout
from gridformer.plan.advice import limit_of
from gridformer.plan.prediction import Prediction
from gridformer.plan.price import doubts, sureness


def print_prediction(run: RunConfig, cluster: Cluster, found: Prediction, console: Console) -> None:
    """Prints how long a step takes, where the time goes, what limits it, and the warnings.

    Args:
        run: The run.
        cluster: The cluster.
        found: The prediction.
        console: Where to print.
    """
    n = run.layout.n_processes
    devices = "one device" if n == 1 else f"{n} devices"
    console.print(f"{describe_layout(run.layout)} on {devices} of {cluster.name}")
    tokens = run.train.global_batch * run.seq_len / found.step_s if found.step_s else 0.0
    console.print(
        f"A step takes {seconds(found.step_s)}: forward {seconds(found.forward_s)}, backward "
        f"{seconds(found.backward_s)}, update {seconds(found.update_s)}. That is "
        f"{tokens:,.0f} tokens/s and {found.model_tflops_per_device:.3g} model TFLOP/s per device "
        f"({found.hardware_tflops_per_device:.3g} with what is recomputed)."
    )
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("where the time goes")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    rows = found.parts.rows()
    for name, value in rows:
        table.add_row(name, seconds(value), f"{100 * value / found.step_s:.1f}%")
    for axis, value in found.parts.hidden.items():
        if value > 5e-4 * found.step_s:
            table.add_row(f"(messages over {axis} behind computation)", seconds(value), "")
    console.print(table)
    if found.step_s:
        console.print(limit_of(found), soft_wrap=True)
    if found.peak_gib is None:
        console.print("Memory is estimated for training steps alone.")
    else:
        fits = "It fits" if found.fits else "It does not fit"
        console.print(
            f"{fits}: a rank's tensors take {found.peak_gib:.3g} of the {found.limit_gib:.3g} GiB "
            "that leave 5% to spare."
        )
    said = doubts(cluster, n, extrapolated=False)
    for warning in found.warnings:
        if warning not in said:
            console.print(f"Warning: {warning}.", soft_wrap=True)
    console.print(sureness(cluster, n), soft_wrap=True)


def seconds(value: float) -> str:
    """Formats a time, such as `12.3 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} us"
