"""Compares D&SP and D&SP-cSub with pure data parallelism: time, messages and memory of a step.

    python -m benchmarks.subgraph                  # everything: about half an hour on two cores
    python -m benchmarks.subgraph --processes 4 --shapes transformer
    python -m benchmarks.subgraph --quick          # tiny shapes, to try the script

Run it in the repository's root. It prints Markdown on standard output and its progress on standard
error; with --plot it draws the speed-ups. Finished cases are kept in --out, and running the same
command again measures only the missing ones. cases.py holds shapes and variants.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common.machine import describe_machine
from benchmarks.subgraph.cases import HEADS, SHAPES, Case, all_cases, variants
from benchmarks.subgraph.report import cases_of, panels_of, plot, report


def main(
    out: Annotated[
        Path | None, typer.Option(help="Results file (default: runs/bench/subgraph.jsonl).")
    ] = None,
    processes: Annotated[str, typer.Option(help="Numbers of processes out of 2, 4 and 8.")] = "4,8",
    shapes: Annotated[str, typer.Option(help="Shapes out of transformer, t5-large, tiny.")] = "",
    heads: Annotated[str, typer.Option(help="Numbers of heads out of 4, 8, 16, 32.")] = "4,8,16,32",
    rounds: Annotated[int | None, typer.Option(min=1, help="Timed rounds (default: 7).")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds a collective may wait.")] = 900.0,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny shapes, to try the script.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete earlier results and measure everything again.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Save the speed-ups as PNG.")
    ] = None,
) -> None:
    """Measure what is missing, then print everything in the results file as Markdown."""
    out = out or Path("runs/bench") / ("subgraph-quick.jsonl" if quick else "subgraph.jsonl")
    rounds = rounds or (2 if quick else 7)
    names = (shapes or ("tiny" if quick else "transformer,t5-large")).split(",")
    if unknown := set(names) - set(SHAPES):
        raise typer.BadParameter(f"--shapes: {', '.join(unknown)} is none of {', '.join(SHAPES)}")
    if unknown := set(processes.split(",")) - {"2", "4", "8"}:
        raise typer.BadParameter(f"--processes: {', '.join(unknown)} is none of 2, 4 and 8")
    if fresh:
        out.unlink(missing_ok=True)
    if unknown := set(heads.split(",")) - {*map(str, HEADS)}:
        raise typer.BadParameter(f"--heads: {', '.join(unknown)} is none of 4, 8, 16 and 32")
    wanted = [int(number) for number in heads.split(",")]
    cases = [case for n in map(int, processes.split(",")) for case in all_cases(n, names)]
    cases = [case for case in cases if case.heads in wanted]
    if quick:
        cases = [case for case in cases if case.sweep == "total"]
    cases = [*{case.key: case for case in reversed(cases)}.values()][::-1]
    if picture is not None:
        try:
            panels_of([*cases_of(read(out)), *cases])
        except ValueError as error:
            raise typer.BadParameter(f"--plot: {error}") from None
    _measure(cases, rounds, timeout, out)
    found = read(out)
    if picture is not None:
        plot(found, picture)
    typer.echo(report(found), nl=False)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Read measured cases by key, the newest of each.

    Lines that were cut off, or that lack a variant which is measured now, are skipped.
    """
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
            case = Case(**values["case"])
            names = {row["name"] for row in values["rows"]}
        except (ValueError, KeyError, TypeError):
            continue
        if names.issuperset(variant.name for variant in variants(case.processes)):
            found[case.key] = values
    return found


def _measure(cases: list[Case], rounds: int, timeout: float, out: Path) -> None:
    """Measure every case that the file does not have yet, each in its own processes."""
    from benchmarks.subgraph.group import Plan, measure
    from gridformer.launch import launch

    machine = describe_machine("benchmarks.subgraph")
    finished = read(out)
    typer.echo(
        "the paper's variant: D&SP of heads, slice and concat (attention: outside)", err=True
    )
    for i, case in enumerate(cases, 1):
        title = f"{i}/{len(cases)} {case.describe()}"
        done = finished.get(case.key)
        if done is not None and done["rounds"] >= rounds:
            typer.echo(f"{title}: measured before; --fresh measures again", err=True)
            continue
        typer.echo(title, err=True)
        start = time.monotonic()
        plan = Plan(case, rounds, 2, timeout, out.resolve(), machine)
        launch(measure, (plan,), case.processes)
        typer.echo(f"  took {time.monotonic() - start:.0f} s", err=True)


if __name__ == "__main__":
    typer.run(main)
