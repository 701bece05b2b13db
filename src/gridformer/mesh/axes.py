"""The axes of the device mesh: the ranks, the group and this rank's index along each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_TOGETHER = {"grid": ("row", "col"), "dp_branch": ("dp", "branch")}


@dataclass(frozen=True)
class Axis:
    """One mesh axis as seen from this device.

    `index` is the coordinate of this device along the axis, 0 to size-1. The devices that differ
    only in this index form the group of the axis. An axis of size 1 needs no group, because its
    collectives do nothing. A larger axis without a group (`Axes.world`) uses the default group.
    `across` is the axis of the ranks that have this index in other blocks of a larger axis, if this
    is a block of one (`Axes.split_in_levels`).
    """

    name: str
    size: int = 1
    index: int = 0
    group: ProcessGroup | None = None
    across: Axis | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks along the axis, by index."""
        if self.group is None and self.size == 1:
            return (self.index,)
        from torch.distributed import get_process_group_ranks

        return tuple(get_process_group_ranks(self.group))

    @cached_property
    def over_nccl(self) -> bool:
        """Whether messages go over NCCL; see `gridformer.mesh.groups.over_nccl`."""
        from gridformer.mesh.groups import over_nccl

        return over_nccl(self.group)


class MeshRanks(NamedTuple):
    """The rank at each place of a mesh, the last axis innermost, with names and sizes of axes."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def each(self) -> Iterable[tuple[int, tuple[int, ...]]]:
        """Returns every rank and its indices along the axes."""
        return zip(self.ranks, product(*map(range, self.shape)))


class Split(NamedTuple):
    """The names of the axes that `Axes.split` creates: of blocks, one rank of each; of the ranks of
    a block, which hold equal parts; and of these together with `row`.
    """

    block: str
    copy: str
    row_copy: str


@dataclass(frozen=True)
class Axes:
    """The axes of a layout, among them `world`, the axis of all ranks.

    Attributes:
        row: The rows of one replica's grid. The devices that differ only in this index form a
            *column*, so a broadcast "along row i" of the papers is a collective over the axis
            `col`.
        grid: Both `row` and `col`.
        branch: The sub-grids of sub-graph parallelism; the index is that of the sub-grid.
        dp_branch: dp and branch together.
        batch: The axis over which the samples of one replica's micro-batch are sharded. It is one
            of the axes above, or has size 1.
        sequence: The axis over which the tokens of each sequence are sharded where every device
            attends for its own tokens: `row`, or an axis of size 1.
        same_batch: The axis along which devices receive the same tokens of the same samples. It is
            one of the axes above, or has size 1.
        pp_lines: The ranks along pp, one line for each place in the other axes.
        places: The rank at each place of the mesh; None for one process.

    `split` and `split_in_levels` create further axes, which `axes[name]` returns.
    """

    pp: Axis = Axis("pp")
    dp: Axis = Axis("dp")
    row: Axis = Axis("row")
    col: Axis = Axis("col")
    grid: Axis = Axis("grid")
    branch: Axis = Axis("branch")
    dp_branch: Axis = Axis("dp_branch")
    batch: Axis = Axis("batch")
    sequence: Axis = Axis("sequence")
    same_batch: Axis = Axis("same_batch")
    world: Axis = Axis("world")
    device_type: str = "cpu"
    pp_lines: tuple[tuple[int, ...], ...] = ()
    places: MeshRanks | None = field(default=None, repr=False)
    further: dict[str, Axis] = field(default_factory=dict, compare=False, repr=False)
    _holders: dict[tuple[int, ...], Axis] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __getitem__(self, name: str) -> Axis:
        axis: Axis = self.further.get(name) or getattr(self, name)
        return axis

    def split(self, name: str, n_blocks: int, label: str) -> Split:
        """Splits an axis into blocks of adjacent ranks that hold equal parts of parameters.

        All processes must call this in the same order. Another call with the same arguments creates
        nothing. `label` is the prefix of the names of the axes.
        """
        label = f"{label}{n_blocks}"
        split = Split(label, f"{label}_copy", f"row_{label}_copy")
        axis = self[name]
        each = axis.size // n_blocks
        if split.block not in self.further:
            made = {
                split.block: self._across(name, each, split.block),
                split.copy: self._copies(name, each, (), split.copy),
            }
            made[split.row_copy] = replace(made[split.copy], name=split.row_copy)
            if self.row.size > 1:
                made[split.row_copy] = self._copies(name, each, ("row",), split.row_copy)
            self.further.update(made)
        return split

    def split_in_levels(self, name: str, size: int) -> None:
        """Splits an axis into blocks of `size` adjacent ranks, and creates the axis across blocks.

        The new axes are `{name}_shard` and its `across`, `{name}_replicate`. All processes must
        call this in the same order.
        """
        import torch

        if self.places is None:
            return
        over = [one for one in _TOGETHER.get(name, (name,)) if one in self.places.names]
        ranks = torch.tensor(self.places.ranks).view(self.places.shape)
        lines, here = _lines(ranks, self.places.names, over), self.world.index
        blocks = [line[i : i + size] for line in lines for i in range(0, len(line), size)]
        alike = [line[i::size] for line in lines for i in range(size)]
        across = _axis_of(f"{name}_replicate", alike, here)
        block = _axis_of(f"{name}_shard", blocks, here)
        self.further.update({across.name: across, block.name: replace(block, across=across)})

    def fold(self, name: str, over: Collection[str], n_dp: int) -> None:
        """Creates one axis of several, with blocks of `n_dp` neighbors of dp if it is one of them.

        The axis across these blocks is `{name}_replicate`. All processes must call this in the same
        order.
        """
        import torch

        copies = f"{name}_replicate"
        self.further.update({name: Axis(name), copies: Axis(copies)})
        if self.places is None:
            return
        ranks = torch.tensor(self.places.ranks).view(self.places.shape)
        at = self.places.names.index("dp")
        ranks, names = ranks.unflatten(at, (-1, n_dp)), [*self.places.names]
        names.insert(at, copies)
        for one, axes in ((name, [n for n in names if n in over]), (copies, [copies])):
            if axes:
                self.further[one] = _axis_of(one, _lines(ranks, names, axes), self.world.index)

    def sharding(self, name: str) -> Axis:
        """Returns the axis over which parameters with replicas along an axis are sharded."""
        return self.further.get(f"{name}_shard") or self[name]

    def _copies(self, name: str, each: int, over: Sequence[str], new: str) -> Axis:
        """Creates the axis of the ranks in one block of `each` ranks along an axis."""
        if each == 1 and all(self[other].size == 1 for other in over):
            return Axis(new)
        return self._grouped(new, name, lambda i: i // each, over)

    def _across(self, name: str, each: int, new: str) -> Axis:
        """Creates the axis of the ranks at one place in blocks of `each` ranks along an axis."""
        axis = self._grouped(new, name, lambda i: i % each)
        n_blocks, block = self[name].size // each, self[name].index // each
        return replace(axis, size=n_blocks, index=block)

    def _grouped(
        self, new: str, name: str, by: Callable[[int], int], over: Sequence[str] = ()
    ) -> Axis:
        """Creates an axis of ranks for whose index along an axis `by` returns the same.

        They may also differ along the axes `over`.
        """
        if self.places is None:
            return Axis(new)
        lines: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank, place in self.places.each():
            block = tuple(
                by(i) if other == name else i
                for other, i in zip(self.places.names, place)
                if other not in over
            )
            lines[block].append(rank)
        return _axis_of(new, [sorted(line) for line in lines.values()], self.world.index)

    def new_groups(self, sets: Iterable[Sequence[int]], purpose: str) -> ProcessGroup | None:
        """Creates groups of the ranks with certain indices along pp, one group for each pp line.

        All processes must call this in the same order, with the same disjoint sets of indices.

        Returns:
            The group that contains this process, or None if there is none.
        """
        from gridformer.mesh.groups import make_groups

        return make_groups(_lines_among(self.pp_lines, tuple(map(tuple, sets))), purpose)

    def make_holders(self, sets: Iterable[tuple[int, ...]]) -> None:
        """Creates the groups that `holders` returns for these sets, the same on all processes."""
        for stages in sets:
            if stages not in self._holders and len(stages) < self.pp.size:
                group = self.new_groups([stages], "pp")
                place = stages.index(self.pp.index) if group else 0
                self._holders[stages] = Axis("pp", len(stages), place, group)

    def holders(self, stages: tuple[int, ...]) -> Axis:
        """Returns the ranks that have these indices along pp as an axis named pp.

        This rank must be one of them, and `make_holders` must have been called with these indices
        unless they are all of pp.
        """
        return self.pp if len(stages) == self.pp.size else self._holders[stages]

    @staticmethod
    def of(ranks: Tensor, names: Sequence[str], device_type: str) -> Axes:
        """Creates the axes of a mesh of all processes. Every process must call this.

        `ranks`, int64, has one dimension per axis and ascends along each.
        """
        import torch.distributed as dist

        here = dist.get_rank()
        axes = {"world": Axis("world", ranks.numel(), here)}
        for name in names:
            axes[name] = _axis_of(name, _lines(ranks, names, (name,)), here)
        for name, over in _TOGETHER.items():
            larger = [axes[part] for part in over if part in axes and axes[part].size > 1]
            if len(larger) == 2:
                axes[name] = _axis_of(name, _lines(ranks, names, over), here)
            elif larger:
                axes[name] = replace(larger[0], name=name)
        lines = _lines(ranks, names, ("pp",)) if "pp" in names else []
        places = MeshRanks(tuple(names), tuple(ranks.shape), tuple(ranks.flatten().tolist()))
        pp_lines = tuple(map(tuple, lines))
        further: dict[str, Axis] = {}  # a variable of its own, so that it is not one of `axes`
        return Axes(
            **axes, device_type=device_type, pp_lines=pp_lines, places=places, further=further
        )


@lru_cache(maxsize=64)  # a trace plays several ranks one after the other
def _lines_among(
    lines: tuple[tuple[int, ...], ...], sets: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks at some indices of each line, for several sets of indices."""
    return tuple(tuple(sorted(line[i] for i in one)) for one in sets for line in lines)


def _lines(ranks: Tensor, names: Sequence[str], over: Sequence[str]) -> list[list[int]]:
    """Returns the ranks along some dimensions of a mesh, one line per place in the others."""
    dims = [names.index(name) for name in over]
    along = ranks.movedim(dims, [*range(-len(dims), 0)]).flatten(-len(dims))
    return [sorted(line) for line in along.reshape(-1, along.shape[-1]).tolist()]


def _axis_of(name: str, lines: list[list[int]], here: int) -> Axis:
    """Returns the axis whose groups are these lines.

    A line of one rank needs no group, and the line of all ranks uses the default group.
    """
    import torch.distributed as dist

    from gridformer.mesh.groups import make_groups

    (mine,) = (line for line in lines if here in line)
    if len(mine) == 1:
        return Axis(name)
    group = dist.group.WORLD if len(lines) == 1 else make_groups(lines, name)
    return Axis(name, len(mine), mine.index(here), group)
