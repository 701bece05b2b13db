"""Tensor-parallel schemes side by side on this machine: time, messages and memory of a layer.

    python -m benchmarks.schemes                      # everything: 1 to 2 hours on two cores
    python -m benchmarks.schemes --processes 4 --sizes small --recomputation off
    python -m benchmarks.schemes --only megatron,optimus-auto

Run it in the repository's root. It prints Markdown on standard output and its progress on standard
error. Finished groups (a size, a number of processes, with or without recomputation) are kept in
--out, and running the same command again measures only the missing ones. The text above the tables
says what is measured and how; variants.py and torch_variants.py hold the variants, cases.py the
shapes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common.machine import describe_machine
from benchmarks.schemes import results
from benchmarks.schemes.cases import PROCESSES, SIZES, Case
from benchmarks.schemes.report import REFERENCE, draw, report
from gridformer.utils.files import check_output

RECOMPUTATION = {"off": False, "on": True}


def main(
    out: Annotated[
        Path | None, typer.Option(help="Results file (default: runs/bench/schemes.jsonl).")
    ] = None,
    processes: Annotated[
        str,
        typer.Option(
            help="Numbers of processes out of 1, 4, 9, 16 (default: all; with --quick: 4)."
        ),
    ] = "",
    sizes: Annotated[
        str, typer.Option(help="Sizes out of small, large, tiny (default: small,large).")
    ] = "",
    recomputation: Annotated[str, typer.Option(help="Recomputation: off, on or both.")] = "off,on",
    only: Annotated[
        str, typer.Option(help="Names of variants; the one-process reference always runs too.")
    ] = "",
    rounds: Annotated[int | None, typer.Option(min=1, help="Timed rounds (default: 15).")] = None,
    warmups: Annotated[
        int | None, typer.Option(min=0, help="Untimed rounds before those (default: 3).")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds a collective may wait.")] = 900.0,
    plot: Annotated[Path | None, typer.Option(help="Also draw the ratios into a PNG.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny shapes, to try the script.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete earlier results and measure everything again.")
    ] = False,
) -> None:
    """Measure what is missing, then print everything in the results file as Markdown."""
    out = out or Path("runs/bench") / ("schemes-quick.jsonl" if quick else "schemes.jsonl")
    rounds = rounds or (2 if quick else 15)
    warmups = warmups if warmups is not None else (1 if quick else 3)
    names = _chosen(sizes or ("tiny" if quick else "small,large"), tuple(SIZES), "--sizes")
    numbers = _chosen(
        processes or ("4" if quick else "all"), tuple(map(str, PROCESSES)), "--processes"
    )
    switches = _chosen(recomputation, tuple(RECOMPUTATION), "--recomputation")
    cases = [
        Case(name, int(number), RECOMPUTATION[switch])
        for number in numbers
        for name in names
        for switch in switches
    ]
    if plot is not None:
        check_output("--plot", plot)
    if fresh:
        out.unlink(missing_ok=True)
    _measure(cases, only, rounds, warmups, timeout, out)
    groups = results.read(out).values()
    if plot is not None:
        draw(groups, plot)
    typer.echo(report(groups), nl=False)


def _measure(
    cases: list[Case], only: str, rounds: int, warmups: int, timeout: float, out: Path
) -> None:
    """Run every case that the file does not have yet, each in its own processes."""
    from benchmarks.schemes.group import Plan, all_variants, measure
    from gridformer.launch import launch

    known = sorted({v.name for number in PROCESSES for v in all_variants(number)})
    asked = _chosen(only or "all", tuple(known), "--only")
    machine = describe_machine("benchmarks.schemes")
    finished = results.read(out)
    for i, case in enumerate(cases, 1):
        here = [v.name for v in all_variants(case.processes)]
        variants = tuple(name for name in here if name in asked or name == REFERENCE)
        title = f"{i}/{len(cases)} {case.describe()} ({case.size})"
        done = finished.get(case.key)
        if done is not None and done.covers(case, variants, rounds):
            when = " of ".join(filter(None, (done.machine["date"], done.machine["commit"])))
            typer.echo(f"{title}: measured before ({when}); --fresh measures again", err=True)
            continue
        typer.echo(title, err=True)
        start = time.monotonic()
        plan = Plan(case, variants, rounds, warmups, timeout, out.resolve(), machine)
        launch(measure, (plan,), case.processes)
        typer.echo(f"  took {time.monotonic() - start:.0f} s", err=True)


def _chosen(text: str, known: tuple[str, ...], option: str) -> list[str]:
    """Parse a comma-separated choice, in the order of `known`; `all` means everything."""
    if text == "all":
        return list(known)
    words = {word.strip() for word in text.split(",") if word.strip()}
    if unknown := words - set(known):
        raise typer.BadParameter(
            f"{option}: {', '.join(sorted(unknown))} is none of {', '.join(known)}"
        )
    return [name for name in known if name in words]


if __name__ == "__main__":
    typer.run(main)
