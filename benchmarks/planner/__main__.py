"""Prints the tables of docs/results/planner.md: published steps against predicted ones.

    python -m benchmarks.planner --out docs/results/planner.md     # all, in their places there
    python -m benchmarks.planner                # prints them
    python -m benchmarks.planner frontera-rtx5000 dgx-h100
    python -m benchmarks.planner held-out
    python -m benchmarks.planner map --cells cells.jsonl --plot docs/results/planner-map.png
    python -m benchmarks.planner speed          # docs/results/planner-speed.md
    python -m benchmarks.planner any-layout     # times of predict for layouts drawn at random

The numbers of the shipped cluster files are used; python -m benchmarks.planner.fit fits them.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planner.any_layout import COMMANDS
from benchmarks.planner.any_layout import main as measure_any
from benchmarks.planner.apart import apart_lines
from benchmarks.planner.fit import fit_rows
from benchmarks.planner.held_out import held_out
from benchmarks.planner.map import main as draw_map
from benchmarks.planner.page import fill
from benchmarks.planner.pricing import cluster_of, error, predicted, record
from benchmarks.planner.rows import FITS, calibration_rows
from benchmarks.planner.speed import main as measure_speed
from benchmarks.planner.torchtitan import lines as torchtitan_lines

TABLES = [*FITS, "held-out", "torchtitan"]


def main(arguments: Sequence[str]) -> None:
    if arguments and arguments[0] == "map":
        parser = ArgumentParser("benchmarks.planner map", description="Which layout wins where.")
        parser.add_argument("words", nargs="*", help="clusters and models; all of them if none")
        parser.add_argument("--cells", type=Path, required=True, help="a file of found cells")
        parser.add_argument("--plot", type=Path, help="a PNG file to write")
        asked = parser.parse_args(arguments[1:])
        draw_map(asked.cells, asked.plot, asked.words)
        return
    if arguments and arguments[0] == "speed":
        parser = ArgumentParser("benchmarks.planner speed", description="Times of the commands.")
        parser.add_argument("words", nargs="*", help="only commands that contain all of them")
        measure_speed(parser.parse_args(arguments[1:]).words)
        return
    if arguments and arguments[0] == "any-layout":
        parser = ArgumentParser("benchmarks.planner any-layout", description="Times of a command.")
        parser.add_argument("--command", choices=COMMANDS, default="predict")
        parser.add_argument("--number", type=int, default=60, help="how many layouts")
        parser.add_argument("--seed", type=int, default=1, help="draws other ones")
        asked = parser.parse_args(arguments[1:])
        measure_any(asked.command, asked.number, asked.seed)
        return
    parser = ArgumentParser(
        "benchmarks.planner", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="TABLE", help=f"one of {', '.join(TABLES)}")
    parser.add_argument("--out", type=Path, help="the page to put the tables into")
    asked = parser.parse_args(arguments)
    for name in asked.names:
        if name not in TABLES:
            parser.error(f"there is no table {name}; tables are {', '.join(TABLES)}")
    for name in asked.names or TABLES:
        others = {"held-out": apart, "torchtitan": torchtitan_lines}
        lines = others[name]() if name in others else calibrated(name).lines
        if asked.out is not None:
            fill(asked.out, name, lines)
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
