"""The two ends of a branch section: tensors go from one grid to sub-grids, and come back.

    `spread`    split: every sub-grid gets the tensor      slice: every sub-grid gets its columns
    `collect`   sum: what sub-grids have is added up       concat: it is put into columns

They are each other's transposes: forward spread, backward collect, and the other way round. With
*columns* for a sub-grid it is slice and concat, without split and sum; all else is the same.

Samples lie round-robin on every grid. Where the sub-grids are of one size m and make up the source
(D&SP), or the first of them is the source (D&SP-cSub), process x of each form a group that
exchanges among itself, a *segmented* collective:

    split, sum        all-gather, reduce-scatter (D&SP)    broadcast, reduce (cSub)
    slice, concat     all-to-all, all-to-all               scatter, gather

Everything else (sub-grids of other sizes, a batch that does not divide, other sources) goes by
point-to-point messages, one from each process to each that has samples of it, posted together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from gridformer import comm
from gridformer.mesh import Axis
from gridformer.parallel.branches.grids import Grid

Spans = Sequence[Sequence[tuple[int, int]]]  # by sub-grid, the columns [start, stop) of each branch


@dataclass(frozen=True)
class Columns:
    """Which columns along `dim` belong to which sub-grid; `total` of them."""

    dim: int
    total: int
    spans: Spans

    def width(self, grid: int) -> int:
        return sum(stop - start for start, stop in self.spans[grid])

    def pick(self, x: Tensor, grid: int) -> Tensor:
        parts = [x.narrow(self.dim, start, stop - start) for start, stop in self.spans[grid]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def add(self, x: Tensor, part: Tensor, grid: int) -> None:
        """Add a sub-grid's columns to all of them, in place."""
        done = 0
        for start, stop in self.spans[grid]:
            n = stop - start
            x.narrow(self.dim, start, n).add_(part.narrow(self.dim, done, n))
            done += n


@dataclass(frozen=True)
class Section:
    """One section as a process sees it.

    source: where the tensors outside the branches lie. grids: the sub-grids; together they are the
    processes of the section, the source's among them. rank: of this process. world: the axis of all
    processes. segment: the group of this process's place in all sub-grids, by sub-grid, or None.
    """

    source: Grid
    grids: tuple[Grid, ...]
    rank: int
    world: Axis
    device: torch.device
    segment: Axis | None = field(default=None, compare=False)

    @property
    def mine(self) -> int:
        """Which sub-grid this process belongs to."""
        return next(y for y, grid in enumerate(self.grids) if self.rank in grid)

    @property
    def on_source(self) -> bool:
        return self.rank in self.source

    def count(self, n_samples: int) -> int:
        """Samples of this process inside the branches."""
        return len(self.grids[self.mine].samples(self.rank, n_samples))

    def form(self, n_samples: int) -> str:
        """`all` or `first` where a segmented collective serves, else `messages`."""
        if self.segment is None:
            return "messages"
        if self.source == self.grids[0]:
            return "first" if n_samples >= len(self.source) else "messages"
        return "messages" if n_samples % len(self.source) else "all"

    # ------------------------------------------------------------ raw; autograd stands below

    def spread(self, x: Tensor, columns: Columns | None, n_samples: int) -> Tensor:
        """x of this process, on the meta device where it is not on the source; see the module."""
        if self.on_source:
            want = len(self.source.samples(self.rank, n_samples))
            if x.shape[0] != want:
                raise ValueError(
                    f"rank {self.rank} enters a branch section with {x.shape[0]} samples where it "
                    f"holds {want} of {n_samples}: take them with `local`, and keep samples along "
                    "dimension 0"
                )
        match self.form(n_samples):
            case "all":
                return self._spread_all(x, columns)
            case "first":
                return self._spread_first(x, columns, n_samples)
        return self._spread_messages(x, columns, n_samples)

    def collect(self, z: Tensor, columns: Columns | None, n_samples: int) -> Tensor:
        """z of this process's sub-grid to its part on the source (elsewhere on the meta device)."""
        z = z.contiguous()
        match self.form(n_samples):
            case "all":
                return self._collect_all(z, columns)
            case "first":
                return self._collect_first(z, columns, n_samples)
        return self._collect_messages(z, columns, n_samples)

    def _spread_all(self, x: Tensor, columns: Columns | None) -> Tensor:
        # Sample k = (p*g + y)*m + x lies on the source as the p-th of process y*m + x, and on each
        # sub-grid as the (p*g + y)-th of process x: the parts of y go side by side.
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
        found = comm.all_to_all([*parts.unbind(1)], shapes, axis, "concat")
        return self._joined(found, columns, parts.shape[0], z)

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
        found = comm.gather(z, shapes, axis, 0, "concat")
        if found is None:
            return self._elsewhere(z, _with(z, columns.dim, columns.total), n_samples)
        return self._joined(found, columns, z.shape[0], z)

    def _spread_messages(self, x: Tensor, columns: Columns | None, n_samples: int) -> Tensor:
        out = self._new(self._inside(x, columns, n_samples), x)
        sends: dict[int, Tensor] = {}
        if self.on_source:
            for y, grid in enumerate(self.grids):
                part = x if columns is None else columns.pick(x, y)
                for rank in grid.ranks:
                    rows = _rows(self.source, self.rank, grid, rank, n_samples)
                    if rows.numel():
                        sends[rank] = part[rows.to(x.device)]
        receives, places = {}, {}
        grid = self.grids[self.mine]
        for rank in self.source.ranks:
            rows = _rows(grid, self.rank, self.source, rank, n_samples)
            if rows.numel():
                places[rank] = rows.to(out.device)
                receives[rank] = out.new_empty((rows.numel(), *out.shape[1:]))
        comm.exchange(sends, receives, self.world, "spread")
        for rank, rows in places.items():
            out[rows] = receives[rank]
        return out

    def _collect_messages(self, z: Tensor, columns: Columns | None, n_samples: int) -> Tensor:
        grid, sends = self.grids[self.mine], {}
        for rank in self.source.ranks:
            rows = _rows(grid, self.rank, self.source, rank, n_samples)
            if rows.numel():
                sends[rank] = z[rows.to(z.device)]
        if not self.on_source:
            comm.exchange(sends, {}, self.world, "collect")
            shape = z.shape if columns is None else _with(z, columns.dim, columns.total)
            return self._elsewhere(z, shape, n_samples)
        n = len(self.source.samples(self.rank, n_samples))
        receives, places = {}, {}
        for y, other in enumerate(self.grids):
            shape = z.shape if columns is None else _with(z, columns.dim, columns.width(y))
            for rank in other.ranks:
                rows = _rows(self.source, self.rank, other, rank, n_samples)
                if rows.numel():
                    places[rank] = y, rows.to(z.device)
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
        """The shape in this process's sub-grid of what is x outside."""
        shape = x.shape if columns is None else _with(x, columns.dim, columns.width(self.mine))
        return self.count(n_samples), *shape[1:]

    def _elsewhere(self, z: Tensor, shape: Sequence[int], n_samples: int) -> Tensor:
        """Stands on other processes for what is on the source: as many samples as on its first."""
        n = len(self.source.samples(self.source.ranks[0], n_samples))
        return z.new_empty((n, *shape[1:]), device="meta")

    def _new(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return torch.empty(*shape, dtype=like.dtype, device=self.device)


def split_or_slice(x: Tensor, section: Section, columns: Columns | None, n_samples: int) -> Tensor:
    """Differentiable `Section.spread`. Backward sum, or concat."""
    there = partial(section.spread, columns=columns, n_samples=n_samples)
    back = partial(section.collect, columns=columns, n_samples=n_samples)
    out: Tensor = _End.apply(x, None, there, back)
    return out


def sum_or_concat(z: Tensor, section: Section, columns: Columns | None, n_samples: int) -> Tensor:
    """Differentiable `Section.collect`. Backward split, or slice.

    Its result always takes part in autograd, so that backward goes through it on every process or
    on none, whatever the branches of a sub-grid are.
    """
    there = partial(section.collect, columns=columns, n_samples=n_samples)
    back = partial(section.spread, columns=columns, n_samples=n_samples)
    anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
    out: Tensor = _End.apply(z, anchor, there, back)
    return out


class _End(torch.autograd.Function):
    """One end of a section: a linear map forward, its transpose backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor | None,
        there: Callable[[Tensor], Tensor],
        back: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(grads[0]), None, None, None


@lru_cache(maxsize=4096)
def _rows(grid: Grid, rank: int, other: Grid, peer: int, n_samples: int) -> Tensor:
    """Where on `rank` of `grid` the samples lie that are also on `peer` of `other`, in order."""
    number = other.ranks.index(peer)
    samples = grid.samples(rank, n_samples)
    return torch.tensor(
        [place for place, k in enumerate(samples) if k % len(other) == number], dtype=torch.int64
    )


def _with(x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    """The shape of x with another size along a dimension."""
    shape = list(x.shape)
    shape[dim] = size
    return tuple(shape)
