"""An axis of the device mesh as collectives see it: who takes part, and which one am I."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Axes:
    """The four axes of a layout (pipeline stage, replica, grid row, grid column), the whole grid of
    one replica as an axis, and all of the layout.

    `row` indexes the rows of the grid, so the devices that differ only in it form a *column*: a
    broadcast "along row i" of the papers is a collective over the axis `col`.
    """

    pp: Axis = Axis("pp")
    dp: Axis = Axis("dp")
    row: Axis = Axis("row")
    col: Axis = Axis("col")
    grid: Axis = Axis("grid")
    world: Axis = Axis("world")

    def __getitem__(self, name: str) -> Axis:
        axis: Axis = getattr(self, name)
        return axis

    @staticmethod
    def of(mesh: DeviceMesh) -> Axes:
        """The axes of a mesh with the dimensions ("pp", "dp", "row", "col") over all processes."""
        axes = {"world": Axis("world", mesh.size(), mesh.get_rank(), None)}
        for name, size in zip(mesh.mesh_dim_names or (), mesh.shape):
            if size > 1:
                axis = Axis(name, size, mesh.get_local_rank(name), mesh.get_group(name))
                axes[name] = axis
        axes["grid"] = _grid(mesh, axes.get("row", Axis("row")), axes.get("col", Axis("col")))
        return Axes(**axes)


def _grid(mesh: DeviceMesh, row: Axis, col: Axis) -> Axis:
    """Rows and columns taken together, row by row."""
    if row.size == 1 or col.size == 1:
        line = row if row.size > 1 else col
        return Axis("grid", line.size, line.index, line.group)
    group = mesh["row", "col"]._flatten("grid").get_group()
    return Axis("grid", row.size * col.size, row.index * col.size + col.index, group)
