"""The page with which a soak ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.soak.draw import Drawn
from benchmarks.soak.kinds import KINDS
from benchmarks.soak.life import Met

_LONGEST = 110
TOLERANCE = 1e-9  # of runs that went on in another layout
# Of runs that kept their layout. They are equal in every bit on AMD processors. On Intel's, where
# MKL computes products, two of 20 differed by less than 1e-14.
ROUNDING = 1e-12


@dataclass
class Lived:
    """The end of a run.

    Attributes:
        moved: Whether it went on in another layout.
        starts: How often it was started.
        met: Its faults.
        difference: Between its last checkpoint and that of the undisturbed run; None without one.
        problems: What is not as it should be, besides those of the faults.
        too_late: How many faults did not happen, as the run had ended before.
    """

    drawn: Drawn
    moved: bool
    starts: int
    met: list[Met]
    difference: float | None
    problems: list[str]
    too_late: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether nothing was lost: the difference is one of rounding, or there is none."""
        if self.difference is None:
            return False
        return self.difference <= (TOLERANCE if self.moved else ROUNDING)

    def all_problems(self) -> list[str]:
        """Returns every problem with the number of its fault."""
        found = [
            f"fault {met.fault.number} ({met.fault.kind.title}, {met.layout}): {problem}"
            for met in self.met
            for problem in met.problems
        ]
        found += [
            f"run {self.drawn.number} ({self.drawn.layout}): {text}" for text in self.problems
        ]
        if not self.is_equal:
            found.append(
                f"run {self.drawn.number} ({self.drawn.layout}): the last checkpoint differs from "
                f"the undisturbed one by {self.difference}"
            )
        return found


def page(runs: Sequence[Lived], machine: dict[str, str], left_out: Sequence[str]) -> list[str]:
    """Returns the paragraphs of the page: what was run, the table, the weights, the problems."""
    faults = [met for run in runs for met in run.met]
    problems = [problem for run in runs for problem in run.all_problems()]
    head = (
        f"`{machine['command']}`, {machine['date']}, commit {machine['commit']}, "
        f"{machine['cores']} cores ({machine['cpu']}), torch {machine['torch']}: {len(faults)} "
        f"faults in {len(runs)} runs, {sum(run.starts for run in runs)} starts, "
        f"{len(problems)} problems."
    )
    if too_late := sum(run.too_late for run in runs):
        head += f" {too_late} more came after the end of their run, and are not counted."
    parts = [head, _table(faults), _weights(runs)]
    if left_out:
        parts.append(f"Left out, since no small disk can be mounted here: {', '.join(left_out)}.")
    if problems:
        parts.append("\n".join(["Problems:", "", *(f"- {problem}" for problem in problems)]))
    return parts


def _table(faults: Sequence[Met]) -> str:
    lines = [
        "| fault | times | exit codes | what the run said | resumed from step | steps lost |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        met = [one for one in faults if one.fault.kind == kind]
        if not met:
            continue
        codes = sorted({"goes on" if one.code is None else str(one.code) for one in met})
        said = next((one.said for one in met if one.said), "")
        steps = ", ".join(str(one.resumed) for one in met if one.resumed is not None)
        lost = [one.lost for one in met]
        cells = [
            kind.title,
            str(len(met)),
            "at the next start" if kind.act == "damage" else ", ".join(codes),
            f"`{shortened(said)}`" if said else "nothing",
            steps or "-",
            str(lost[0]) if len({*lost}) == 1 else f"{min(lost)} to {max(lost)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _weights(runs: Sequence[Lived]) -> str:
    same = [run for run in runs if not run.moved]
    moved = [run for run in runs if run.moved]
    text = (
        "Weights and moments of the last checkpoints, compared with undisturbed runs: "
        f"{sum(run.difference == 0.0 for run in same)} of {len(same)} runs that kept their layout "
        "are equal in every bit"
    )
    if rounded := [run.difference for run in same if run.difference and run.is_equal]:
        text += f", and {len(rounded)} to {max(rounded):.1g}"
    if moved:
        worst = max(float("inf") if r.difference is None else r.difference for r in moved)
        text += (
            f"; {sum(run.is_equal for run in moved)} of {len(moved)} that changed it are equal to "
            f"{TOLERANCE:g}, the largest difference is {worst:.1g}"
        )
    return f"{text}."


def shortened(said: str) -> str:
    """Returns a line as the table shows it, without the folders of this machine."""
    text = re.sub(r"(/[\w.+-]+)+/(run-\d+)", r"\2", said).replace("|", "\\|").replace("`", "'")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rstrip()} ..."
