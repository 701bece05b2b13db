"""`gridformer calibrate`: measures this machine and writes a cluster file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    out: Annotated[Path, typer.Option("--out", help="The cluster file to write.")] = Path(
        "local.yaml"
    ),
    processes: Annotated[
        str,
        typer.Option(help="On a CPU: numbers of processes that compute at the same time."),
    ] = "1,2,4,8,16",
    limit: Annotated[
        float, typer.Option(min=1.0, help="On a GPU: the seconds that kernels may take in all.")
    ] = 80.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure a few tiny cases, to try the command.")
    ] = False,
) -> None:
    """Measure this machine and write a cluster file for predict and plan.

    This measures products, attention and other kernels, what Python adds to
    them, and messages between processes. On a CPU, several processes share
    the cores, so it measures with 1 to 16 of them at the same time. It takes
    one to two minutes, in which nothing else should run.

    Try: gridformer calibrate --out local.yaml
    """
    from gridformer.calibrate.machine import calibrate as measure
    from gridformer.calibrate.write import write_cluster
    from gridformer.utils.errors import ConfigError
    from gridformer.utils.files import check_output

    if not re.fullmatch(r"[1-9]\d{0,3}(,[1-9]\d{0,3})*", processes):
        raise ConfigError([f"--processes {processes}: use numbers from 1, such as 1,2,4"])
    counts = sorted({int(word) for word in processes.split(",")})
    check_output("--out", out)
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError([f"--out {out}: name a YAML file, such as local.yaml"])
    cluster, failures = measure(counts, quick, limit, lambda text: typer.echo(text, err=True))
    write_cluster(cluster, out)
    for failure in failures:
        typer.echo(f"not measured: {failure}", err=True)
    device = cluster.device
    peaks = ", ".join(f"{figure.value:g} {dtype}" for dtype, figure in device.peak_tflops.items())
    typer.echo(f"{device.name}: {device.memory_gib.value:g} GiB, {device.memory_gbps.value:g} GB/s")
    typer.echo(f"TFLOP/s of the fastest product: {peaks}")
    typer.echo(f"The host adds {cluster.host.launch_us.value:g} us to each kernel")
    typer.echo(f"Wrote {out}: use it with --cluster {out}")
