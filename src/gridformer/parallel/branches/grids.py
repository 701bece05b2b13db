"""Ordered sets of processes, the samples on each of them, and the assignment of branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Order = Literal["topology", "contiguous"]


@dataclass(frozen=True)
class Grid:
    """An ordered set of n processes. Sample k of a batch is the (k div n)-th on process k mod n.

    Attributes:
        ranks: Distinct global ranks. A process is numbered by its position among them.

    Raises:
        ValueError: There is no rank, or a rank occurs twice.
    """

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"a grid needs one or more distinct ranks, not {self.ranks}")

    def __len__(self) -> int:
        return len(self.ranks)

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks

    def samples(self, rank: int, n_samples: int) -> range:
        """Returns the global indices of the samples on a process, in its order.

        Args:
            rank: A global rank of the grid.
            n_samples: Size of the global batch.
        """
        return range(self.ranks.index(rank), n_samples, len(self))


def whole(n: int, g: int, order: Order) -> Grid:
    """Returns all n processes in an order that `divide` cuts into the g sub-grids wanted.

    The orders are those of SUPER (Jain et al. 2021). Process x of sub-grid y has rank

    - x*g + y with `topology`: neighboring ranks exchange tensors where sections begin and end;
    - y*n/g + x with `contiguous`: neighboring ranks form a sub-grid.

    Args:
        n: Number of processes.
        g: Number of sub-grids.
        order: `topology` or `contiguous`.
    """
    if order == "contiguous":
        return Grid(tuple(range(n)))
    return Grid(tuple(rank for first in range(g) for rank in range(first, n, g)))


def divide(grid: Grid, g: int) -> list[Grid]:
    """Cuts a grid into g sub-grids of consecutive processes.

    If g does not divide the number of processes, the first sub-grids have one process more.

    Raises:
        ValueError: g is not between 1 and the number of processes.
    """
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
    """Assigns branches to sub-grids so that the largest work per process is small.

    Takes the branches from the costliest to the cheapest and gives each to the sub-grid where
    (assigned work + its cost) / size is smallest, the first of them in a tie, while ensuring that
    no sub-grid stays empty. This is Graham's LPT rule (1969). With sub-grids of equal size its
    result is at most 4/3 of the optimum.

    Args:
        costs: Cost of each branch, in any unit.
        sizes: Number of processes of each sub-grid, which share the work of its branches.

    Returns:
        For each sub-grid, the indices of its branches in ascending order.

    Raises:
        ValueError: There are fewer branches than sub-grids.
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
