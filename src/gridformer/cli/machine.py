"""`gridformer calibrate` and `doctor`: measure and check this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from gridformer.utils.errors import UserError
from gridformer.utils.files import check_output
from gridformer.utils.process import running


def calibrate(
    out: Path = Path("local.yaml"),
    processes: str = "1,2,4,8,16",
    limit: Annotated[float, typer.Option(min=1)] = 80.0,
    quick: bool = False,
) -> None:
    """Measure this machine and write a cluster file for predict and plan.

    This measures products, attention and other kernels, what Python adds to them, and messages
    between processes. On a CPU, several processes share the cores, so it measures with 1 to 16 of
    them at the same time. It takes one to two minutes, in which nothing else should run.

    Try: gridformer calibrate --out local.yaml

    Args:
        out: The cluster file to write.
        processes: On a CPU: numbers of processes that compute at the same time.
        limit: On a GPU: the seconds that kernels may take in all.
        quick: Measure a few tiny cases, to try the command.
    """
    if not re.fullmatch(r"[1-9]\d{0,3}(,[1-9]\d{0,3})*", processes):
        raise UserError(f"--processes {processes}: use numbers from 1, such as 1,2,4")
    counts = sorted({int(word) for word in processes.split(",")})
    check_output("--out", out)
    if out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {out}: name a YAML file, such as local.yaml")
    if busy := running():
        typer.echo(f"This machine is busy, so times will be too long: {busy}", err=True)
    from gridformer.calibrate.machine import calibrate as measure
    from gridformer.calibrate.machine import write_cluster

    cluster, failures = measure(counts, quick, limit, lambda text: typer.echo(text, err=True))
    write_cluster(cluster, out, busy)
    for failure in failures:
        typer.echo(f"not measured: {failure}", err=True)
    device = cluster.device
    peaks = ", ".join(f"{figure.value:g} {dtype}" for dtype, figure in device.peak_tflops.items())
    typer.echo(f"{device.name}: {device.memory_gib.value:g} GiB, {device.memory_gbps.value:g} GB/s")
    typer.echo(f"TFLOP/s of the fastest product: {peaks}")
    typer.echo(f"The host adds {cluster.host.launch_us.value:g} us to each kernel")
    typer.echo(f"Wrote {out}: use it with --cluster {out}")


def doctor(
    nproc: Annotated[int, typer.Option(min=1, max=64)] = 4,
    timeout: Annotated[float, typer.Option(min=1)] = 60.0,
) -> None:
    """Check what training needs, connect some processes, and measure their speed.

    This checks versions, devices, memory, disk and network, and says how to
    fix each problem. The exit code is 0 if training works.

    Try: gridformer doctor --nproc 8

    Args:
        nproc: The number of local processes to connect.
        timeout: The number of seconds after which they count as hung.
    """
    from gridformer.doctor import examine

    marks = {
        "ok": typer.style("✓", fg=typer.colors.GREEN),
        "warn": typer.style("!", fg=typer.colors.YELLOW, bold=True),
        "bad": typer.style("✗", fg=typer.colors.RED, bold=True),
    }
    usable = True
    for finding in examine(nproc, timeout):
        usable = usable and finding.level != "bad"
        typer.echo(f"{marks[finding.level]} {finding.text}")
        for line in finding.remedy.splitlines():
            typer.echo(f"    {line}")
    typer.echo("Ready to train." if usable else "Not ready: fix the lines marked ✗ first.")
    raise typer.Exit(0 if usable else 1)
