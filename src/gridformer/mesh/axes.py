"""An axis of the device mesh as collectives see it: who takes part, and which one am I."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gridformer.mesh.groups import make_groups

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_TOGETHER = {"grid": ("row", "col"), "dp_branch": ("dp", "branch")}


@dataclass(frozen=True)
class Axis:
    """One mesh axis seen from this device.

    `index` is this device's place along the axis, 0 to size-1. Devices that differ only in that
    index form the axis's group. An axis of size 1 needs no group: its collectives do nothing. A
    larger axis without one (`Axes.world`) stands for torch's default group.
    """

    name: str
    size: int = 1
    index: int = 0
    group: ProcessGroup | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the world along the axis, by index. One that has no group is all the world."""
        if self.group is None and self.size == 1:
            return (self.index,)
        from torch.distributed import get_process_group_ranks

        return tuple(get_process_group_ranks(self.group))


@dataclass(frozen=True)
class Axes:
    """The axes of a layout, and all of the layout as one.

    pp, dp: pipeline stage and replica. row, col: of the grid of one replica; grid: both together.
    `row` indexes the rows of the grid, so the devices that differ only in it form a *column*: a
    broadcast "along row i" of the papers is a collective over the axis `col`.
    branch: sub-grids of sub-graph parallelism, one index each; dp_branch: dp and branch together.
    batch: over which the samples of one replica's micro-batch are cut; same_batch: along which
    devices are given the same samples. Each is one of those before, or of size 1. pp_lines: ranks
    along pp, of all processes, this one's line among them.
    """

    pp: Axis = Axis("pp")
    dp: Axis = Axis("dp")
    row: Axis = Axis("row")
    col: Axis = Axis("col")
    grid: Axis = Axis("grid")
    branch: Axis = Axis("branch")
    dp_branch: Axis = Axis("dp_branch")
    batch: Axis = Axis("batch")
    same_batch: Axis = Axis("same_batch")
    world: Axis = Axis("world")
    device_type: str = "cpu"
    pp_lines: tuple[tuple[int, ...], ...] = ()
    _holders: dict[tuple[int, ...], Axis] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __getitem__(self, name: str) -> Axis:
        axis: Axis = getattr(self, name)
        return axis

    def new_group(self, stages: Sequence[int], purpose: str = "pp") -> ProcessGroup | None:
        """A group of the ranks with these indices along pp, one for every line of ranks; of this
        process's line, if it is in it. All processes must ask for it, in one order."""
        return self.new_groups([stages], purpose)

    def new_groups(self, sets: Iterable[Sequence[int]], purpose: str) -> ProcessGroup | None:
        """The same for several sets of indices that share none: the one that this process is in."""
        lines = [sorted(line[i] for i in stages) for stages in sets for line in self.pp_lines]
        return make_groups(lines, purpose)

    def make_holders(self, sets: Iterable[tuple[int, ...]]) -> None:
        """Prepare `holders` for some sets of indices along pp; the same sets on all processes."""
        for stages in sets:
            if stages not in self._holders and len(stages) < self.pp.size:
                group = self.new_group(stages)
                place = stages.index(self.pp.index) if group else 0
                self._holders[stages] = Axis("pp", len(stages), place, group)

    def holders(self, stages: tuple[int, ...]) -> Axis:
        """The ranks along pp with these indices, this one among them, as an axis named pp."""
        return self.pp if len(stages) == self.pp.size else self._holders[stages]

    @staticmethod
    def of(ranks: Tensor, names: Sequence[str], device_type: str) -> Axes:
        """The axes of a mesh over all processes. Every process asks for it.

        Args:
            ranks: the rank at each place of the mesh; ranks rise along every dimension.
            names: of its dimensions, as the fields of `Axes` are called.
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
        return Axes(**axes, device_type=device_type, pp_lines=tuple(map(tuple, lines)))


def _lines(ranks: Tensor, names: Sequence[str], over: Sequence[str]) -> list[list[int]]:
    """The ranks along some dimensions of a mesh together, in their order; a line for each place in
    the others."""
    dims = [names.index(name) for name in over]
    along = ranks.movedim(dims, [*range(-len(dims), 0)]).flatten(-len(dims))
    return [sorted(line) for line in along.reshape(-1, along.shape[-1]).tolist()]


def _axis_of(name: str, lines: list[list[int]], here: int) -> Axis:
    """The axis whose groups are these lines. One rank alone needs none, and all of them together
    have one: the default group."""
    import torch.distributed as dist

    (mine,) = (line for line in lines if here in line)
    if len(mine) == 1:
        return Axis(name)
    group = dist.group.WORLD if len(lines) == 1 else make_groups(lines, name)
    return Axis(name, len(mine), mine.index(here), group)
