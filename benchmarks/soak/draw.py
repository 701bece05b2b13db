"""Draws which faults hit which runs: the same ones for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.soak.kinds import KINDS, Kind

FAULTS_OF_A_RUN = 5
_MOVES = 0.2  # how often a run goes on in another layout
_STARTING = 0.3  # how often a fault that may come before the first step does
_LONGEST_START_S = 6.0
_MOST_STEPS = 6

# Few processes, since each imports torch; overrides of the run file.
LAYOUTS: dict[str, tuple[int, str]] = {
    "single": (1, "scheme=single"),
    "megatron 1x2": (2, "scheme=megatron cols=2"),
    "dp=2, zero1": (2, "scheme=single dp=2 dp_mode=zero1"),
    "dp=2, fsdp": (2, "scheme=single dp=2 dp_mode=fsdp"),
    "pp=2": (2, "scheme=single pp=2 micro_batches=2"),
    "subgraph of 2": (2, "scheme=subgraph branches=2"),
    "megatron_2d 2x1": (2, "scheme=megatron_2d rows=2"),
    "megatron 1x2, pp=2": (4, "scheme=megatron cols=2 pp=2 micro_batches=2"),
    "optimus 2x2": (4, "scheme=optimus rows=2 cols=2"),
}


@dataclass(frozen=True)
class Fault:
    """A fault that was drawn.

    Attributes:
        number: Counts all faults from 1.
        kind: What happens.
        steps: How many steps the run has done since its start.
        starting_s: Seconds after the start at which it comes instead; None means after `steps`.
        part: Which rank, file or bit, as a fraction of their number.
        layout: The layout in which the run goes on before this fault; None means as before.
    """

    number: int
    kind: Kind
    steps: int
    starting_s: float | None
    part: float
    layout: str | None = None


@dataclass(frozen=True)
class Drawn:
    """A run, in the layout in which it begins, and its faults in order."""

    number: int
    layout: str
    faults: tuple[Fault, ...]


def draw(n_faults: int, seed: int, kinds: Sequence[Kind] = KINDS) -> list[Drawn]:
    """Returns runs with `n_faults` faults together; each kind is drawn about equally often."""
    chooser = random.Random(seed)
    left: list[Kind] = []
    while len(left) < n_faults:
        some = list(kinds)
        chooser.shuffle(some)
        left += some
    left = left[:n_faults]
    runs: list[Drawn] = []
    number = 0
    while left:
        layout = chooser.choice(list(LAYOUTS))
        fits = [kind for kind in left if LAYOUTS[layout][0] > 1 or not kind.needs_workers]
        faults: list[Fault] = []
        for kind in fits[:FAULTS_OF_A_RUN]:
            left.remove(kind)
            number += 1
            in_starting = kind.in_starting and chooser.random() < _STARTING
            new = None
            if faults and chooser.random() < _MOVES:
                new = chooser.choice([name for name in LAYOUTS if name != "single"])
            faults.append(
                Fault(
                    number,
                    kind,
                    chooser.randint(1, _MOST_STEPS),
                    chooser.uniform(0.0, _LONGEST_START_S) if in_starting else None,
                    chooser.random(),
                    new,
                )
            )
        if faults:
            runs.append(Drawn(len(runs) + 1, layout, tuple(faults)))
    return runs
