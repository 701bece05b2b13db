"""An axis of the device mesh as collectives see it: who takes part, and which one am I."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


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
    branch: sub-grids of sub-graph parallelism, one index each; every: dp and branch together.
    batch: over which the samples of one replica's micro-batch are cut; alike: along which devices
    are given the same samples. Each is one of those before, or of size 1. lines: ranks along pp,
    of all processes, this one's line among them.
    """

    pp: Axis = Axis("pp")
    dp: Axis = Axis("dp")
    row: Axis = Axis("row")
    col: Axis = Axis("col")
    grid: Axis = Axis("grid")
    branch: Axis = Axis("branch")
    every: Axis = Axis("every")
    batch: Axis = Axis("batch")
    alike: Axis = Axis("alike")
    world: Axis = Axis("world")
    device_type: str = "cpu"
    lines: tuple[tuple[int, ...], ...] = ()
    _holders: dict[tuple[int, ...], Axis] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __getitem__(self, name: str) -> Axis:
        axis: Axis = getattr(self, name)
        return axis

    def new_group(self, stages: tuple[int, ...]) -> ProcessGroup | None:
        """A group of the ranks with these indices along pp, one for every line of ranks; of this
        process's line, if it is in it. All processes must ask for it, as torch demands: the names
        of groups that are made by their members alone count what else a process has made."""
        from torch.distributed import new_group

        mine = None
        for line in self.lines:
            group = new_group([line[stage] for stage in stages])
            if line == self.pp.ranks and self.pp.index in stages:
                mine = group
        return mine

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
    def of(mesh: DeviceMesh) -> Axes:
        """The axes of a mesh over all processes, whose dimensions are named as axes are."""
        axes = {"world": Axis("world", mesh.size(), mesh.get_rank(), None)}
        for name, size in zip(mesh.mesh_dim_names or (), mesh.shape):
            if size > 1:
                axis = Axis(name, size, mesh.get_local_rank(name), mesh.get_group(name))
                axes[name] = axis
        for name, outer, inner in (("grid", "row", "col"), ("every", "dp", "branch")):
            both = axes.get(outer, Axis(outer)), axes.get(inner, Axis(inner))
            axes[name] = _together(mesh, name, *both)
        names = mesh.mesh_dim_names or ()
        lines: list[list[int]] = []
        if "pp" in names:
            along = mesh.mesh.movedim(names.index("pp"), -1)
            lines = along.reshape(-1, along.shape[-1]).tolist()
        return Axes(**axes, device_type=mesh.device_type, lines=tuple(map(tuple, lines)))


def _together(mesh: DeviceMesh, name: str, outer: Axis, inner: Axis) -> Axis:
    """Two axes taken as one, in the order of ranks; on grids the inner one's index runs faster."""
    if outer.size == 1 or inner.size == 1:
        line = outer if outer.size > 1 else inner
        return Axis(name, line.size, line.index, line.group)
    group = mesh[outer.name, inner.name]._flatten(name).get_group()
    return Axis(name, outer.size * inner.size, group.rank(), group)
