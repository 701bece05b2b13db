"""Memory: the largest batch of every scheme under a budget, and the time that saving memory costs.

    python -m benchmarks.memory                    # everything: about an hour on two cores
    python -m benchmarks.memory --parts limits --scalings small
    python -m benchmarks.memory --quick            # a little of each part, to try the script

Run it in the repository's root. It prints Markdown on standard output and its progress on standard
error; with --plot it draws the limits. Finished results are kept in --out, and running the same
command again finds only the missing ones. cases.py holds the cases.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common.machine import describe_machine
from benchmarks.memory.cases import (
    AT_EQUAL_BATCH,
    HYBRID,
    OPTIMUS,
    PRICE_LAYOUTS,
    SCALINGS,
    family,
    schemes,
)
from benchmarks.memory.report import plot, report
from gridformer.parallel.registry import spec_of
from gridformer.parallel.validation import check_layout
from gridformer.utils.errors import ConfigError

Found = list[dict[str, Any]]
PARTS = ("limits", "equal", "shares", "price")
SHARES = (("small", 4), ("small", 9), ("paper", 4), ("paper", 9), ("paper", 16), ("paper", 64))


def main(
    out: Annotated[
        Path | None, typer.Option(help="Results file (default: runs/bench/memory.jsonl).")
    ] = None,
    parts: Annotated[
        str, typer.Option(help="Parts out of limits, equal, shares, price.")
    ] = ",".join(PARTS),
    scalings: Annotated[str, typer.Option(help="Scalings out of paper, small.")] = ",".join(
        SCALINGS
    ),
    processes: Annotated[
        str, typer.Option(help="Numbers of processes out of 1, 4, 9, 16, 36, 64.")
    ] = "1,4,9,16,36,64",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds for each price.")] = 9,
    quick: Annotated[
        bool, typer.Option("--quick", help="A little of each part, to try the script.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete earlier results and find everything again.")
    ] = False,
    picture: Annotated[Path | None, typer.Option("--plot", help="Save the limits as PNG.")] = None,
) -> None:
    """Find what is missing, then print everything in the results file as Markdown."""
    out = out or Path("runs/bench") / ("memory-quick.jsonl" if quick else "memory.jsonl")
    rounds = 2 if quick else rounds
    chosen, wanted = parts.split(","), ["small"] if quick else scalings.split(",")
    for option, words, known in (("parts", chosen, PARTS), ("scalings", wanted, [*SCALINGS])):
        if unknown := set(words) - set(known):
            raise typer.BadParameter(
                f"--{option}: {', '.join(unknown)} is none of {', '.join(known)}"
            )
    if picture is not None and not {"limits", "equal"} & {*chosen}:
        raise typer.BadParameter("--plot: nothing to plot, since --parts has no limits or equal")
    if fresh:
        out.unlink(missing_ok=True)
    machine = describe_machine("benchmarks.memory")
    done = {json.dumps(one["case"]) for one in read(out)}
    numbers = [1, 4] if quick else [int(number) for number in processes.split(",")]
    for number, (case, work) in enumerate(jobs := _jobs(chosen, wanted, numbers, rounds), 1):
        title = f"{number}/{len(jobs)} {' '.join(map(str, case))}"
        if json.dumps(case) in done:
            typer.echo(f"{title}: found before; --fresh finds it again", err=True)
            continue
        began = time.monotonic()
        line = {"case": case, "found": work(read(out)), "machine": machine}
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        typer.echo(f"{title}: {time.monotonic() - began:.0f} s", err=True)
    found = read(out)
    if picture is not None:
        plot(found, picture)
    typer.echo(report(found), nl=False)


def read(path: Path) -> Found:
    """Read all results, skipping a line that was cut off."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


Job = tuple[list[Any], Callable[[Found], Any]]  # the callable gets what was found before


def _divides(name: str, processes: int, title: str) -> bool:
    """Return whether the layout divides the model; sequence parallelism cannot divide s by 9."""
    layout = schemes(processes)[title]
    try:
        check_layout(SCALINGS[name].run(layout, layout.n_processes))
    except ConfigError:
        return False
    return True


def _jobs(parts: list[str], scalings: list[str], numbers: list[int], rounds: int) -> list[Job]:
    """Return the jobs, each with its case: the name of its part and what the part is about."""
    jobs: list[Job] = []
    if "limits" in parts:
        for name in scalings:
            for processes in numbers:
                for title in schemes(processes):
                    if not _divides(name, processes, title):
                        continue
                    case = ["limit", name, processes, title]
                    jobs.append((case, partial(_limit, name, processes, title)))
    if "equal" in parts:
        for name in scalings:
            for processes in numbers:
                for title in schemes(processes):
                    if family(title) in AT_EQUAL_BATCH and _divides(name, processes, title):
                        case = ["equal", name, processes, title]
                        jobs.append((case, partial(_equal, name, processes, title)))
    if "shares" in parts:
        for name, processes in SHARES:
            for recompute in ("none", "full"):
                if name in scalings and processes in numbers:
                    case = ["share", name, processes, recompute]
                    jobs.append((case, partial(_shares, name, processes, recompute)))
    if "price" in parts:
        for layout, shape in PRICE_LAYOUTS.items():
            if shape.n_processes in numbers:
                jobs.append((["price", layout], partial(_price, layout, rounds)))
    return jobs


def _limit(name: str, processes: int, title: str, _: Found) -> dict[str, Any]:
    """Estimate the limit, and measure its peak in real processes if the scaling says so."""
    from benchmarks.memory.limits import largest_batch

    limit = largest_batch(name, processes, title)
    found: dict[str, Any] = {**asdict(limit), "measured": None}
    if limit.batch and processes in SCALINGS[name].measured:
        found["measured"] = _measured(name, processes, title, limit.batch)
        found["measured_more"] = _measured(name, processes, title, limit.batch + limit.unit)
    return found


def _equal(name: str, processes: int, title: str, found: Found) -> dict[str, int]:
    """Return the peak with Optimus's largest batch, or the layout's next smaller one."""
    from benchmarks.memory.limits import largest_batch, peak_of

    known = [one["found"] for one in found if one["case"] == ["limit", name, processes, OPTIMUS]]
    of_optimus = known[-1]["batch"] if known else largest_batch(name, processes, OPTIMUS).batch
    layout = schemes(processes)[title]
    batch = of_optimus - of_optimus % spec_of(layout).batch_parts(layout)
    return {"batch": batch, "peak": peak_of(SCALINGS[name].run(layout, batch)) if batch else 0}


def _measured(name: str, processes: int, title: str, batch: int) -> int:
    from benchmarks.memory.limits import measure
    from gridformer.launch import launch

    run = SCALINGS[name].run(schemes(processes)[title], batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peak"
        launch(measure, (run, path), processes)
        return int(path.read_text())


def _shares(name: str, processes: int, recompute: str, _: Found) -> dict[str, float]:
    """Return shares by scheme, for a batch of 4 sequences per process."""
    from benchmarks.memory.limits import share

    return {
        title: share(layout, 4 * processes, name, recompute)
        for title, layout in schemes(processes).items()
        if family(title) != HYBRID and _divides(name, processes, title)
    }


def _price(layout: str, rounds: int, _: Found) -> list[dict[str, Any]]:
    from benchmarks.memory.price import measure
    from gridformer.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines"
        launch(measure, (layout, rounds, 2, path), PRICE_LAYOUTS[layout].n_processes)
        return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    typer.run(main)
