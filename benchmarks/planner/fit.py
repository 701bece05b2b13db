"""Fits the shipped clusters' numbers to the published steps that they may be fitted to.

    python -m benchmarks.planner.fit                     # all clusters: about five minutes
    python -m benchmarks.planner.fit frontera-rtx5000

For each cluster it prints the `fitted:` section of its file, and a table of errors: of the fit, and
of each row when the numbers are fitted to the other rows. It changes no file.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence

import numpy as np

from benchmarks.planner.fitting import DETERMINED, Fit, fit, with_fitted
from benchmarks.planner.pricing import RecordedRow, cluster_of, error, predicted, record
from benchmarks.planner.rows import FITS, calibration_rows


def main(arguments: Sequence[str]) -> None:
    parser = ArgumentParser(
        "benchmarks.planner.fit", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="CLUSTER", help=f"one of {', '.join(FITS)}")
    asked = parser.parse_args(arguments)
    for name in asked.names:
        if name not in FITS:
            parser.error(f"nothing is fitted for {name}; clusters are {', '.join(FITS)}")
    for name in asked.names or FITS:
        rows = [record(row) for row in calibration_rows(name)]
        print(report(name, rows, fit_rows(name, rows)), flush=True)


def fit_rows(name: str, rows: Sequence[RecordedRow]) -> Fit:
    """Fits the numbers of a cluster to recorded rows."""
    known: dict[tuple[tuple[float, ...], int], float] = {}

    def evaluate(values: dict[str, float], chosen: Sequence[int]) -> np.ndarray:
        found = []
        for index in chosen:
            key = (tuple(values.values()), index)
            if key not in known:
                cluster = with_fitted(cluster_of(rows[index].row), values)
                known[key] = error(rows[index].row, predicted(rows[index], cluster))
            found.append(np.log1p(known[key]))
        return np.array(found)

    return fit(FITS[name], len(rows), evaluate)


def report(name: str, rows: Sequence[RecordedRow], found: Fit) -> str:
    """Returns the section of a cluster file, and the table of errors."""
    lines = [f"# {name}", "fitted:"]
    for number, value in found.values.items():
        others = [values[number] for values in found.left_out_values]
        determined = found.unknown[number] < DETERMINED
        lines += [
            f"  {number}:",
            f"    value: {value:.3g}",
            f"    source: python -m benchmarks.planner.fit {name}",
            f"    data: {rows[0].row.source.split(',')[0]}, {len(rows)} rows",
            f"    identified: {str(determined).lower()}",
            f"    # {found.unknown[number]:.0%} of what was not known remains; "
            f"{min(others):.3g} to {max(others):.3g} with one row left out",
        ]
    lines += ["", "| row | published | error | left out |", "|---|---|---|---|"]
    for recorded, one, out in zip(rows, found.errors, found.left_out):
        row = recorded.row
        lines.append(f"| {row.name} | {row.published:g} {row.value} | {one:+.1%} | {out:+.1%} |")
    lines.append(
        f"| mean | | {np.abs(found.errors).mean():.1%} | {np.abs(found.left_out).mean():.1%} |"
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
