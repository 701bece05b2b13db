"""Prints a prediction."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.parallel.registry import describe_layout
from gridformer.plan.prediction import Prediction

_LIMITS = {
    "matrix products": "the speed of matrix products",
    "attention": "the speed of attention",
    "memory-bound kernels": "the bandwidth of the devices' memory",
    "waiting for the host": "the host, which launches kernels too slowly for the device",
    "optimizer": "the optimizer",
    "waiting for other ranks": "waiting for other ranks, as in the bubble of a pipeline",
}


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
    if rows:
        name = rows[0][0]
        console.print(f"What limits it: {_LIMITS.get(name, name)}.")
    if found.peak_gib is None:
        console.print("Memory is estimated for training steps alone.")
    else:
        fits = "It fits" if found.fits else "It does not fit"
        console.print(
            f"{fits}: a rank's tensors take {found.peak_gib:.3g} of the {found.limit_gib:.3g} GiB "
            "that leave 5% to spare."
        )
    for warning in found.warnings:
        console.print(f"Warning: {warning}.", soft_wrap=True)


def seconds(value: float) -> str:
    """Formats a time, such as `12.3 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} us"
