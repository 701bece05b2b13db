"""D&SP and D&SP-cSub beside pure data parallelism: time, messages, elements and memory of a step.

    python -m benchmarks.subgraph                  # everything: about half an hour on two cores
    python -m benchmarks.subgraph --processes 4 --shapes transformer
    python -m benchmarks.subgraph --quick          # tiny shapes, to try the script

Run it in the repository's root. It prints Markdown on standard output, how far it is on standard
error, and with --plot draws the speed-ups. Finished cases are kept in --out; the same command goes
on with those that are missing. Shapes and variants are in cases.py.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common.machine import describe_machine
from benchmarks.subgraph.cases import HEADS, SHAPES, Case, all_cases, variants
from benchmarks.subgraph.report import plot, report


def main(
    out: Annotated[
        Path | None, typer.Option(help="File of results (runs/bench/subgraph.jsonl).")
    ] = None,
    processes: Annotated[str, typer.Option(help="Numbers of processes, of 2, 4 and 8.")] = "4,8",
    shapes: Annotated[str, typer.Option(help="Of transformer, t5-large, tiny.")] = "",
    heads: Annotated[str, typer.Option(help="Of 4, 8, 16, 32.")] = "4,8,16,32",
    rounds: Annotated[int | None, typer.Option(min=1, help="Timed rounds (7).")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds a collective may wait.")] = 900.0,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny shapes, to try the script.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what was measured.")] = False,
    picture: Annotated[Path | None, typer.Option("--plot", help="PNG of the speed-ups.")] = None,
) -> None:
    """Measure what is missing, then print everything that is in the file as Markdown."""
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
    _measure(cases, rounds, timeout, out)
    found = read(out)
    if picture is not None:
        plot(found, picture)
    typer.echo(report(found), nl=False)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Measured cases by key, the newest of each. A line that was cut off is passed over, and one
    that was written before there was a variant that is measured now."""
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
    """Every case that the file does not have yet, each in its own processes."""
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
