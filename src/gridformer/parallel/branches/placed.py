"""A network that `parallelize_branches` has placed: its sections on this process, and their use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.comm.autograd import one_thread
from gridformer.mesh import Axis
from gridformer.models.branches import Branches, slice_widths
from gridformer.parallel.branches.section import (
    Columns,
    Grid,
    Section,
    split_or_slice,
    sum_or_concat,
)
from gridformer.parallel.data.gradients import GradientSums, clip


@dataclass
class SharedBatchSize:
    """Number of samples of the current global batch, shared by all sections of a network."""

    n_samples: int = 0


@dataclass(frozen=True)
class SectionRow:
    """Description of a section: its name, its sub-grids, and their branches and work."""

    section: str
    grids: tuple[Grid, ...]
    branches: list[list[int]]
    work: list[float]


class PlacedBranches(nn.Module):
    """A section with this process's branches, between the collectives that enter and leave it.

    Dimension 0 of its input and output holds this process's samples.
    """

    def __init__(
        self, plain: Branches, section: Section, held: list[list[int]], batch: SharedBatchSize
    ):
        super().__init__()
        self.section, self.held, self.batch = section, held, batch
        self.enter, self.leave, self.dim = plain.enter, plain.leave, plain.dim
        self.sizes, self.n_branches = plain.sizes, len(plain.branches)
        mine = held[section.mine]
        self.branches = nn.ModuleDict({str(i): plain.branches[str(i)] for i in mine})
        self._columns: dict[tuple[int, ...], Columns] = {}

    def forward(self, x: Tensor) -> Tensor:
        n = self.batch.n_samples
        if not n:
            raise ValueError(
                "a branch section does not know the batch size: take the samples of each batch "
                "with `local` first"
            )
        columns = None
        if self.enter == "slice":
            widths = slice_widths(self.sizes, self.n_branches, x.shape[self.dim])
            columns = self._spans(widths)
        inside = split_or_slice(x, self.section, columns, n)
        inputs: Sequence[Tensor] = [inside] * len(self.branches)
        if columns is not None:
            spans = columns.spans[self.section.mine]
            inputs = inside.split([stop - start for start, stop in spans], self.dim)
        results = [branch(part) for branch, part in zip(self.branches.values(), inputs)]
        if self.leave == "concat":
            z = torch.cat(results, self.dim)
            columns = self._result_columns(results, x)
            return sum_or_concat(z, self.section, columns, n)
        z = results[0]
        for result in results[1:]:
            z = z + result
        return sum_or_concat(z, self.section, None, n)

    def _spans(self, widths: Sequence[int]) -> Columns:
        starts = [0]
        for width in widths:
            starts.append(starts[-1] + width)
        spans = [[(starts[i], starts[i + 1]) for i in held] for held in self.held]
        return Columns(self.dim, starts[-1], spans)

    def _result_columns(self, results: Sequence[Tensor], x: Tensor) -> Columns:
        """Returns the columns of each branch's result; exchanges the widths once per shape of x."""
        shape = tuple(x.shape[1:])
        if shape not in self._columns:
            mine = [result.shape[self.dim] for result in results]
            widths = torch.zeros(self.n_branches, dtype=torch.int64, device=results[0].device)
            widths[self.held[self.section.mine]] = torch.tensor(mine, device=widths.device)
            self._columns[shape] = self._spans(_known_by_all(widths, self.section))
        return self._columns[shape]


def _known_by_all(widths: Tensor, section: Section) -> list[int]:
    """Exchanges numbers; every sub-grid knows its own and has zeros for those of the others."""
    grids, rank = section.grids, section.rank
    here = grids[section.mine].ranks.index(rank)
    # A process receives from one process of each other sub-grid, and sends to those with its own
    # position modulo the size of its sub-grid.
    sends, receives = {}, {}
    for y, grid in enumerate(grids):
        if y == section.mine:
            continue
        size, other = len(grids[section.mine]), len(grid)
        for x in range(other):
            if x % size == here:
                sends[grid.ranks[x]] = widths
        receives[grids[y].ranks[here % other]] = torch.zeros_like(widths)
    comm.exchange(sends, receives, section.world, "widths")
    total: list[int] = sum(receives.values(), widths).tolist()
    return total


@dataclass
class Placed:
    """One process's part of a network on sub-grids: its `model`, and the parameters that it `held`.

    `common` are the processes that hold the common layers; `describe` lists the `rows`.
    """

    model: nn.Module
    common: Grid
    rows: list[SectionRow]
    rank: int
    world: Axis
    device: torch.device
    held: list[nn.Parameter]
    _counted: list[nn.Parameter]  # this process is the first that holds them
    _batch: SharedBatchSize
    _sums: GradientSums

    @property
    def holds_common(self) -> bool:
        """Whether results of the network have values here; elsewhere they are meta tensors."""
        return self.rank in self.common

    def local(self, whole_batch: Tensor) -> Tensor:
        """Returns this process's samples of a global batch, and tells the sections its size.

        The global batch [B, ...] is equal on every process.

        Returns:
            Every n-th sample for n processes with common layers, on this process's device, possibly
            none. On a process without common layers the result is on the meta device.
        """
        self._batch.n_samples = len(whole_batch)
        if self.holds_common:
            number = self.common.ranks.index(self.rank)
            return whole_batch[number :: len(self.common)].to(self.device)
        return whole_batch[:: len(self.common)].to("meta")

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Runs the backward pass; afterward every gradient is that of the global batch.

        Args:
            loss: This process's part of a loss that is a sum over samples.
            last: False for all but the last of several batches whose gradients accumulate.
                Gradients are summed over processes during the last one.
        """
        with one_thread(), self._sums.backward(last):
            loss.backward()
        if last:
            self._sums.finish()

    def total(self, value: Tensor) -> float:
        """Returns the sum over processes of a value such as the loss; call it on every process."""
        mine = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.holds_common:
            mine += value.detach()
        return float(comm.all_reduce(mine, self.world, label="metrics"))

    def clip_gradients(self, max_norm: float) -> float:
        """Scales the gradients so that their global norm is at most `max_norm`.

        Call it on every process, after `backward`.

        Returns:
            The norm before scaling, over all parameters of all processes.
        """
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        grads = [p.grad for p in self.held if p.grad is not None]
        for parameter in self._counted:
            if parameter.grad is not None:
                square += parameter.grad.square().sum()
        return clip(grads, square, self.world, max_norm)

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that an optimizer on this process updates."""
        return [*self.held]

    def describe(self) -> str:
        """Returns a text with the branches and share of work of each sub-grid of each section."""
        lines = [f"common layers on {_listed('rank', self.common.ranks)}"]
        for row in self.rows:
            total = sum(row.work) or 1.0
            n = len(row.grids)
            lines.append(f"{row.section}: {n} sub-grid{'s' * (n != 1)}")
            for grid, branches, work in zip(row.grids, row.branches, row.work):
                names = _listed("branch", branches, "branches")
                lines.append(f"  {_listed('rank', grid.ranks)}: {names} ({work / total:.0%})")
        return "\n".join(lines)


def _listed(word: str, numbers: Sequence[int], plural: str = "") -> str:
    """Formats numbers as `rank 3` or `ranks 0, 2`."""
    word = word if len(numbers) == 1 else plural or f"{word}s"
    return f"{word} {', '.join(map(str, numbers))}"
