"""`gridformer doctor`: checks whether this machine can train, and how to fix what is wrong."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    nproc: Annotated[
        int,
        typer.Option("--nproc", min=1, max=64, help="The number of local processes to connect."),
    ] = 4,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", min=1.0, help="The number of seconds after which they count as hung."
        ),
    ] = 60.0,
) -> None:
    """Check what training needs, connect some processes, and measure their speed.

    This checks versions, devices, memory, disk and network, and says how to
    fix each problem. The exit code is 0 if training works.

    Try: gridformer doctor --nproc 8
    """
    from gridformer.doctor.checks import examine

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
