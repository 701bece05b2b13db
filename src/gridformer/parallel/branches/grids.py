"""Ordered sets of processes, how samples lie on them, and which of them runs which branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Order = Literal["topology", "contiguous"]


@dataclass(frozen=True)
class Grid:
    """Processes in order. Sample k of a batch lies on process k mod n, as its (k div n)-th.

    ranks: of the world, all different. A process's *number* is its place among them.
    """

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"a grid needs processes, each once: {self.ranks}")

    def __len__(self) -> int:
        return len(self.ranks)

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks

    def samples(self, rank: int, n_samples: int) -> range:
        """Those that lie on a process, in its order."""
        return range(self.ranks.index(rank), n_samples, len(self))


def whole(n: int, g: int, order: Order) -> Grid:
    """All of n processes, so ordered that `divide` gives the g sub-grids of an order.

    `topology`: processes g apart form a sub-grid, and neighbors exchange at its ends.
    `contiguous`: neighbors form a sub-grid (Jain et al. 2021; specification, section 4).
    """
    if order == "contiguous":
        return Grid(tuple(range(n)))
    return Grid(tuple(rank for first in range(g) for rank in range(first, n, g)))


def divide(grid: Grid, g: int) -> list[Grid]:
    """g sub-grids of successive processes, the first ones larger by one where n is no multiple."""
    n = len(grid)
    if not 1 <= g <= n:
        raise ValueError(f"{n} processes cannot form {g} sub-grids: use 1 to {n}")
    small, larger = divmod(n, g)
    found, start = [], 0
    for index in range(g):
        stop = start + small + (index < larger)
        found.append(Grid(grid.ranks[start:stop]))
        start = stop
    return found


def assign(costs: Sequence[float], sizes: Sequence[int]) -> list[list[int]]:
    """The branches of each sub-grid: the costliest first, each to where it is done soonest.

    Sub-grid y has sizes[y] processes, which share its branches' work for all samples; a branch goes
    to the sub-grid whose (work + its own) / size is least, the first among equals, but no sub-grid
    stays empty. This is Graham's LPT rule (1969), at most 4/3 of the best for equal sizes.
    Raises ValueError if there are fewer branches than sub-grids.
    """
    n, g = len(costs), len(sizes)
    if n < g:
        raise ValueError(f"{n} branches cannot occupy {g} sub-grids: use at most {n} sub-grids")
    held: list[list[int]] = [[] for _ in sizes]
    work = [0.0] * g
    queue = sorted(range(n), key=lambda branch: -costs[branch])
    for place, branch in enumerate(queue):
        empty = [y for y in range(g) if not held[y]]
        choice = empty if len(empty) >= n - place else range(g)
        best = min(choice, key=lambda y: (work[y] + costs[branch]) / sizes[y])
        held[best].append(branch)
        work[best] += costs[branch]
    return [sorted(branches) for branches in held]
