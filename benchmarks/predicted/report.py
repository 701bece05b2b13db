"""Tables of what was predicted and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One prediction and its measurement, in the same unit."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The relative error; positive if the prediction is too high."""
        return self.predicted / self.measured - 1


def table(rows: Iterable[Row], factor: float, unit: str) -> str:
    """Returns a Markdown table; values are multiplied by `factor`."""
    lines = [f"| | predicted, {unit} | measured, {unit} | error |", "|---|---:|---:|---:|"]
    for row in rows:
        lines.append(
            f"| {row.name} | {factor * row.predicted:.4g} | {factor * row.measured:.4g} | "
            f"{100 * row.error:+.0f}% |"
        )
    return "\n".join(lines)


def mean_error(rows: Sequence[Row]) -> float:
    return sum(abs(row.error) for row in rows) / len(rows)


def error_lines(rows: Sequence[Row]) -> str:
    """Returns a sentence with the mean and the worst error."""
    if not rows:
        return "Nothing was compared."
    worst = max(rows, key=lambda row: abs(row.error))
    return (
        f"{len(rows)} cases: mean error {100 * mean_error(rows):.1f}%, worst "
        f"{100 * worst.error:+.0f}% ({worst.name})."
    )
