"""The two ends of a branch section: tensors go from the source grid to sub-grids, and return.

    `spread`    split: every sub-grid gets the tensor    slice: every sub-grid gets its columns
    `collect`   sum: the sub-grids' tensors are added    concat: they are put into their columns

Each is the other's backward pass. Samples lie round-robin on every grid. If the sub-grids are of
equal size and together are the source (D&SP), or if the source is the first one (D&SP-cSub), the
processes number x of all sub-grids form a group with a collective of its own, which SUPER (Jain et
al. 2021) calls segmented; all other cases use point-to-point messages, all posted together.

    split, sum        all-gather, reduce-scatter (D&SP)    broadcast, reduce (cSub)
    slice, concat     all-to-all, all-to-all               scatter, gather
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm.autograd import pair
from gridformer.mesh import Axis


@dataclass(frozen=True)
class Grid:
    """An ordered set of n global ranks. Sample k of a batch is the (k div n)-th on process k mod n.

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
        """Returns the global indices of the samples on a process, in its order."""
        return range(self.ranks.index(rank), n_samples, len(self))


# For each sub-grid, the columns [start, stop) of each of its branches.
Spans = Sequence[Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Columns:
    """The columns along `dim` that belong to each sub-grid; `total` counts all columns."""

    dim: int
    total: int
    spans: Spans

    def width(self, grid: int) -> int:
        """Returns the number of columns of a sub-grid."""
        return sum(stop - start for start, stop in self.spans[grid])

    def pick(self, x: Tensor, grid: int) -> Tensor:
        """Selects the columns of a sub-grid from x, which has all of them."""
        parts = [x.narrow(self.dim, start, stop - start) for start, stop in self.spans[grid]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def add(self, x: Tensor, part: Tensor, grid: int) -> None:
        """Adds `part`, the columns of a sub-grid, to x, which has all columns, in place."""
        done = 0
        for start, stop in self.spans[grid]:
            n = stop - start
            x.narrow(self.dim, start, n).add_(part.narrow(self.dim, done, n))
            done += n


@dataclass(frozen=True)
class Section:
    """One section, as one process takes part in it.

    Attributes:
        source: Processes that hold the tensors outside the branches.
        grids: The sub-grids. Together they are all processes of the section, including the source.
        segment: The processes with this process's number in each sub-grid, in order of sub-grids;
            None if segmented collectives do not apply.
    """

    source: Grid
    grids: tuple[Grid, ...]
    rank: int
    world: Axis
    device: torch.device
    segment: Axis | None = field(default=None, compare=False)
    _known: dict[Hashable, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def mine(self) -> int:
        """Index of the sub-grid of this process."""
        return next(y for y, grid in enumerate(self.grids) if self.rank in grid)

    @property
    def on_source(self) -> bool:
        """Whether this process holds tensors outside the branches."""
        return self.rank in self.source

    def count(self, n_samples: int) -> int:
        """Returns the number of samples of this process inside the branches."""
        return len(self.grids[self.mine].samples(self.rank, n_samples))

    def form(self, n_samples: int) -> str:
        """Returns how tensors travel for a global batch of `n_samples`.

        `all` and `first` are the segmented collectives of D&SP and D&SP-cSub; `messages` stands for
        point-to-point messages.
        """
        if self.segment is None:
            return "messages"
        if self.source == self.grids[0]:
            return "first" if n_samples >= len(self.source) else "messages"
        return "messages" if n_samples % len(self.source) else "all"

    # ------------------------------------------------------------ without autograd

    def spread(self, x: Tensor, columns: Columns | None, n_samples: int) -> Tensor:
        """Sends x from the source to the sub-grids: split, or slice if `columns` is given.

        Args:
            x: This process's samples [b, ...]; a meta tensor on processes outside the source.

        Raises:
            ValueError: x does not have the number of samples of this process.
        """
        if self.on_source:
            want = len(self.source.samples(self.rank, n_samples))
            if x.shape[0] != want:
                raise ValueError(
                    f"rank {self.rank} enters a branch section with {x.shape[0]} samples but holds "
                    f"{want} of {n_samples}: take the samples of each batch with `local`, and keep "
                    "them along dimension 0"
                )
        match self.form(n_samples):
            case "all":
                return self._spread_all(x, columns)
            case "first":
                return self._spread_first(x, columns, n_samples)
        return self._spread_messages(x, columns, n_samples)

    def collect(self, z: Tensor, columns: Columns | None, n_samples: int) -> Tensor:
        """Brings z from the sub-grids back to the source: sum, or concat if `columns` is given."""
        z = z.contiguous()
        match self.form(n_samples):
            case "all":
                return self._collect_all(z, columns)
            case "first":
                return self._collect_first(z, columns, n_samples)
        return self._collect_messages(z, columns, n_samples)

    def _rows(self, grid: Grid, other: Grid, peer: int, n_samples: int) -> Tensor:
        """Returns positions here, in `grid`, of the samples that `peer` of `other` has, too.

        They stay on the device: the host would wait for a GPU each time that it copies them there.
        """
        key = grid, other, peer, n_samples
        if key not in self._known:
            number = other.ranks.index(peer)
            samples = enumerate(grid.samples(self.rank, n_samples))
            rows = [place for place, k in samples if k % len(other) == number]
            self._known[key] = torch.tensor(rows, dtype=torch.int64, device=self.device)
        return self._known[key]

    def _spread_all(self, x: Tensor, columns: Columns | None) -> Tensor:
        # With m processes per sub-grid, sample k = (p*g + y)*m + x is the p-th sample of process
        # y*m + x on the source, and the (p*g + y)-th sample of process x on each sub-grid. So the
        # samples of all y are interleaved.
        axis = self._segment
        if columns is None:
            return comm.all_gather(x.unsqueeze(1), axis, 1, "split").flatten(0, 1)
        pieces = [columns.pick(x, y) for y in range(axis.size)]
        shapes = [pieces[self.mine].shape] * axis.size
        return torch.stack(comm.all_to_all(pieces, shapes, axis, "slice"), 1).flatten(0, 1)

    def _collect_all(self, z: Tensor, columns: Columns | None) -> Tensor:
        axis = self._segment
        parts = z.unflatten(0, (-1, axis.size))
        if columns is None:
            return comm.reduce_scatter(parts, axis, 1, "sum").squeeze(1)
        shapes = [_with(parts[:, 0], columns.dim, columns.width(y)) for y in range(axis.size)]
        blocks = comm.all_to_all([*parts.unbind(1)], shapes, axis, "concat")
        return self._joined(blocks, columns, parts.shape[0], z)

    def _spread_first(self, x: Tensor, columns: Columns | None, n_samples: int) -> Tensor:
        axis = self._segment
        shape = self._inside(x, columns, n_samples)
        if columns is None:
            out = x.contiguous() if self.on_source else self._new(shape, x)
            return comm.broadcast(out, axis, 0, "split")
        pieces = [columns.pick(x, y) for y in range(axis.size)] if self.on_source else None
        return comm.scatter(pieces, self._new(shape, x), axis, 0, "slice")

    def _collect_first(self, z: Tensor, columns: Columns | None, n_samples: int) -> Tensor:
        axis = self._segment
        if columns is None:
            total = comm.reduce(z.clone(), axis, 0, "sum")
            return total if self.on_source else self._elsewhere(z, z.shape, n_samples)
        shapes = [_with(z, columns.dim, columns.width(y)) for y in range(axis.size)]
        blocks = comm.gather(z, shapes, axis, 0, "concat")
        if blocks is None:
            return self._elsewhere(z, _with(z, columns.dim, columns.total), n_samples)
        return self._joined(blocks, columns, z.shape[0], z)

    def _spread_messages(self, x: Tensor, columns: Columns | None, n_samples: int) -> Tensor:
        out = self._new(self._inside(x, columns, n_samples), x)
        sends: dict[int, Tensor] = {}
        if self.on_source:
            for y, grid in enumerate(self.grids):
                part = x if columns is None else columns.pick(x, y)
                for rank in grid.ranks:
                    rows = self._rows(self.source, grid, rank, n_samples)
                    if rows.numel():
                        sends[rank] = part[rows]
        receives, places = {}, {}
        grid = self.grids[self.mine]
        for rank in self.source.ranks:
            rows = self._rows(grid, self.source, rank, n_samples)
            if rows.numel():
                places[rank] = rows
                receives[rank] = out.new_empty((rows.numel(), *out.shape[1:]))
        comm.exchange(sends, receives, self.world, "spread")
        for rank, rows in places.items():
            out[rows] = receives[rank]
        return out

    def _collect_messages(self, z: Tensor, columns: Columns | None, n_samples: int) -> Tensor:
        grid, sends = self.grids[self.mine], {}
        for rank in self.source.ranks:
            rows = self._rows(grid, self.source, rank, n_samples)
            if rows.numel():
                sends[rank] = z[rows]
        if not self.on_source:
            comm.exchange(sends, {}, self.world, "collect")
            shape = z.shape if columns is None else _with(z, columns.dim, columns.total)
            return self._elsewhere(z, shape, n_samples)
        n = len(self.source.samples(self.rank, n_samples))
        receives, places = {}, {}
        for y, other in enumerate(self.grids):
            shape = z.shape if columns is None else _with(z, columns.dim, columns.width(y))
            for rank in other.ranks:
                rows = self._rows(self.source, other, rank, n_samples)
                if rows.numel():
                    places[rank] = y, rows
                    receives[rank] = z.new_empty((rows.numel(), *shape[1:]))
        comm.exchange(sends, receives, self.world, "collect")
        width = z.shape[1:] if columns is None else _with(z, columns.dim, columns.total)[1:]
        total = z.new_zeros((n, *width))
        for rank, (y, rows) in places.items():
            if columns is None:
                total[rows] += receives[rank]
            else:
                part = total[rows]
                columns.add(part, receives[rank], y)
                total[rows] = part
        return total

    @property
    def _segment(self) -> Axis:
        assert self.segment is not None
        return self.segment

    def _joined(self, parts: Sequence[Tensor], columns: Columns, n: int, like: Tensor) -> Tensor:
        total = like.new_zeros((n, *_with(like, columns.dim, columns.total)[1:]))
        for y, part in enumerate(parts):
            columns.add(total, part, y)
        return total

    def _inside(self, x: Tensor, columns: Columns | None, n_samples: int) -> tuple[int, ...]:
        """Returns the shape that x has in this process's sub-grid."""
        shape = x.shape if columns is None else _with(x, columns.dim, columns.width(self.mine))
        return self.count(n_samples), *shape[1:]

    def _elsewhere(self, z: Tensor, shape: Sequence[int], n_samples: int) -> Tensor:
        """Returns a meta tensor, shaped as on the first process of the source."""
        n = len(self.source.samples(self.source.ranks[0], n_samples))
        return z.new_empty((n, *shape[1:]), device="meta")

    def _new(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return torch.empty(*shape, dtype=like.dtype, device=self.device)


def split_or_slice(x: Tensor, section: Section, columns: Columns | None, n_samples: int) -> Tensor:
    """Differentiable `Section.spread`: forward split (or slice), backward sum (or concat)."""
    there = partial(section.spread, columns=columns, n_samples=n_samples)
    back = partial(section.collect, columns=columns, n_samples=n_samples)
    return pair(x, section.world, there, back)


def sum_or_concat(z: Tensor, section: Section, columns: Columns | None, n_samples: int) -> Tensor:
    """Differentiable `Section.collect`: forward sum (or concat), backward split (or slice).

    The result always requires a gradient if gradients are enabled. So all processes take part in
    the backward pass, even if the branches of a sub-grid have no parameters.
    """
    if torch.is_grad_enabled() and not z.requires_grad:
        z = z.detach().requires_grad_()
    there = partial(section.collect, columns=columns, n_samples=n_samples)
    back = partial(section.spread, columns=columns, n_samples=n_samples)
    return pair(z, section.world, there, back)


def _with(x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    """Returns the shape of x with `size` along dimension `dim`."""
    shape = list(x.shape)
    shape[dim] = size
    return tuple(shape)
