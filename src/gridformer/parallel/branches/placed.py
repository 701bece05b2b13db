"""What `parallelize_branches` makes of a network: its sections on this process, and their use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.comm.autograd import one_thread
from gridformer.mesh import Axis
from gridformer.models.branches import Branches, slice_widths
from gridformer.parallel.branches.grids import Grid
from gridformer.parallel.branches.section import Columns, Section, split_or_slice, sum_or_concat
from gridformer.parallel.data.gradients import GradientSums


@dataclass
class Batch:
    """Samples of the batch that is being worked on; all sections of a network share it."""

    n_samples: int = 0


@dataclass(frozen=True)
class Row:
    """A section for people: its name, sub-grids, their branches and shares of the work."""

    section: str
    grids: tuple[Grid, ...]
    branches: list[list[int]]
    work: list[float]


class PlacedBranches(nn.Module):
    """This process's branches of a section, between the section's two ends."""

    def __init__(self, plain: Branches, section: Section, held: list[list[int]], batch: Batch):
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
            raise ValueError("a branch section needs samples: pass whole batches through `local`")
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
        """Where each branch's result belongs. Others' widths are asked for once a shape of x."""
        shape = tuple(x.shape[1:])
        if shape not in self._columns:
            mine = [result.shape[self.dim] for result in results]
            widths = torch.zeros(self.n_branches, dtype=torch.int64, device=results[0].device)
            widths[self.held[self.section.mine]] = torch.tensor(mine, device=widths.device)
            self._columns[shape] = self._spans(_known_by_all(widths, self.section))
        return self._columns[shape]


def _known_by_all(widths: Tensor, section: Section) -> list[int]:
    """Numbers of which every sub-grid knows its own, the others being zero: each to all."""
    grids, rank = section.grids, section.rank
    here = grids[section.mine].ranks.index(rank)
    # A process tells one of each other sub-grid, the next of its own place there.
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
    """A network on sub-grids, as one process sees it.

    model: runs what this process holds. common: where the layers outside branches lie. rows: the
    sections, for people (`describe`). held: this process's parameters.
    """

    model: nn.Module
    common: Grid
    rows: list[Row]
    rank: int
    world: Axis
    device: torch.device
    held: list[nn.Parameter]
    _counted: list[nn.Parameter]  # those of which this process is the first that holds them
    _batch: Batch
    _sums: GradientSums

    @property
    def holds_common(self) -> bool:
        """Whether results of the network have values here; elsewhere they are shapes."""
        return self.rank in self.common

    def local(self, whole_batch: Tensor) -> Tensor:
        """This process's samples of a whole batch [B, ...], the same on every process.

        Sections take B for the batch's size from the last call. Where common layers are not held
        the result is on the meta device. A process may hold no sample of a small batch.
        """
        self._batch.n_samples = len(whole_batch)
        if self.holds_common:
            number = self.common.ranks.index(self.rank)
            return whole_batch[number :: len(self.common)].to(self.device)
        return whole_batch[:: len(self.common)].to("meta")

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Of this process's share of a loss that is a sum over samples.

        Afterwards every gradient is that of the whole batch. last: false for all but the last of
        several accumulated batches; gradients are added up over processes with the last one.
        """
        with one_thread():
            if not last:
                loss.backward()
                return
            with self._sums.last_backward():
                loss.backward()
        self._sums.finish()

    def total(self, value: Tensor) -> float:
        """The sum of every process's share of a value, such as the loss; the same on all."""
        mine = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.holds_common:
            mine += value.detach()
        return float(comm.all_reduce(mine, self.world, label="metrics"))

    def clip_gradients(self, max_norm: float) -> float:
        """Scale gradients so that the norm of all of them, over all processes, is at most that.

        Returns the norm before. Call after `backward`, on every process.
        """
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        grads = [p.grad for p in self.held if p.grad is not None]
        for parameter in self._counted:
            if parameter.grad is not None:
                square += parameter.grad.square().sum()
        norm = math.sqrt(float(comm.all_reduce(square, self.world, label="metrics")))
        if grads and norm > max_norm:
            torch._foreach_mul_(grads, max_norm / (norm + 1e-6))
        return norm

    def parameters(self) -> list[nn.Parameter]:
        """What an optimizer on this process updates."""
        return [*self.held]

    def describe(self) -> str:
        """One line a section: which branches on which processes, and their share of its work."""
        lines = [f"common layers on {_listed('rank', self.common.ranks)}"]
        for row in self.rows:
            total = sum(row.work) or 1.0
            lines.append(f"{row.section}: {_some('sub-grid', len(row.grids))}")
            for grid, branches, work in zip(row.grids, row.branches, row.work):
                names = _listed("branch", branches, "branches")
                lines.append(f"  {_listed('rank', grid.ranks)}: {names} ({work / total:.0%})")
        return "\n".join(lines)


def _some(word: str, n: int) -> str:
    return f"{n} {word}" + "s" * (n != 1)


def _listed(word: str, numbers: Sequence[int], plural: str = "") -> str:
    """`rank 3`, or `ranks 0, 2`."""
    word = word if len(numbers) == 1 else plural or f"{word}s"
    return f"{word} {', '.join(map(str, numbers))}"
