"""Prints the tables of docs/results/planner.md: published steps against predicted ones.

    python -m benchmarks.planner --out docs/results/planner.md     # all, in their places there
    python -m benchmarks.planner                # prints them
    python -m benchmarks.planner frontera-rtx5000 dgx-h100
    python -m benchmarks.planner held-out
    python -m benchmarks.planner map --plot docs/results/planner-map.png
    python -m benchmarks.planner speed          # docs/results/planner-speed.md

The numbers of the shipped cluster files are used; python -m benchmarks.planner.fit fits them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planner.apart import apart_lines
from benchmarks.planner.fit import fit_rows
from benchmarks.planner.held_out import held_out
from benchmarks.planner.map import main as draw_map
from benchmarks.planner.page import fill
from benchmarks.planner.pricing import cluster_of, error, predicted, record
from benchmarks.planner.rows import FITS, calibration_rows
from benchmarks.planner.speed import main as measure_speed


def main(names: Sequence[str]) -> None:
    if names and names[0] == "map":
        draw_map(names[1:])
        return
    if names and names[0] == "speed":
        measure_speed(names[1:])
        return
    out = None
    if "--out" in names:
        at = names.index("--out")
        names, out = [*names[:at], *names[at + 2 :]], Path(names[at + 1])
    for name in names or [*FITS, "held-out"]:
        lines = apart() if name == "held-out" else calibrated(name).lines
        if out is not None:
            fill(out, name, lines)
            continue
        print(f"## {name}\n")
        print("\n".join(lines), end="\n\n", flush=True)


@dataclass
class Calibrated:
    """How well the rows are predicted that the numbers of a cluster are fitted to.

    Attributes:
        names: The rows.
        errors: Their relative errors with the numbers of the cluster's file.
        left_out: Their relative errors with numbers fitted to all other rows.
        lines: The table.
    """

    names: list[str]
    errors: list[float]
    left_out: list[float]
    lines: list[str]


def calibrated(name: str) -> Calibrated:
    """Predicts the rows that the numbers of a cluster are fitted to."""
    rows = [record(row) for row in calibration_rows(name)]
    left_out = fit_rows(name, rows).left_out.tolist()
    found = [predicted(one, cluster_of(one.row)) for one in rows]
    errors = [error(one.row, value) for one, value in zip(rows, found)]
    lines = [
        "| row | published | predicted | error | predicted when left out | error |",
        "|---|---|---|---|---|---|",
    ]
    for one, value, off, out in zip(rows, found, errors, left_out):
        row = one.row
        is_time = row.value.startswith("s/")
        without = row.published * (1 + out) if is_time else row.published / (1 + out)
        lines.append(
            f"| {row.name} | {row.published:g} {row.value} | {value:.4g} | {off:+.1%} | "
            f"{without:.4g} | {out:+.1%} |"
        )
    means = [sum(map(abs, each)) / len(rows) for each in (errors, left_out)]
    worst = [max(map(abs, each)) for each in (errors, left_out)]
    lines.append(f"| mean | | | {means[0]:.1%} | | {means[1]:.1%} |")
    lines.append(f"| worst | | | {worst[0]:.1%} | | {worst[1]:.1%} |")
    return Calibrated([one.row.name for one in rows], errors, left_out, lines)


def apart() -> list[str]:
    """Returns the tables of published numbers that nothing is fitted to."""
    return apart_lines(held_out(lambda one: print(one, file=sys.stderr, flush=True)))


if __name__ == "__main__":
    main(sys.argv[1:])
