"""Sub-graph parallelism for any network: places its `Branches` on sub-grids; nothing else changes.

    torch.manual_seed(0)
    placed = parallelize_branches(Net(), g=4)                    # on every process
    for images, labels in batches:                      # whole batches, of any size
        x, y = placed.local(images), placed.local(labels)
        loss = F.cross_entropy(placed.model(x), y, reduction="sum") / len(images)
        placed.backward(loss)                           # gradients of the whole batch
        optimizer.step()

This is SUPER (Jain et al. 2021). The common layers, which are outside branches, are data-parallel
over all processes (D&SP) or over the first sub-grid (D&SP-cSub). Elsewhere they are on torch's meta
device and compute only shapes, so they must not depend on values (`.item()`). Layers that mix
samples, such as BatchNorm, see those of one process. Dropout uses each process's own generator.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from gridformer.config import closest
from gridformer.mesh import Axis
from gridformer.mesh.groups import make_groups
from gridformer.models.branches import Branches
from gridformer.parallel.branches.placed import Placed, PlacedBranches, SectionRow, SharedBatchSize
from gridformer.parallel.branches.section import Grid, Section
from gridformer.parallel.data.copies import differing
from gridformer.parallel.data.gradients import GradientSums

_REMEDY = (
    "put modules that read the same input, or slices of it, and whose results are summed or "
    "concatenated, into gridformer.models.branches.Branches; for gridformer's own models use "
    "gridformer.parallel.build_parallel"
)
_BRANCH = "branch "  # no module can have this name
Common = Literal["all", "first"] | Sequence[int]
Order = Literal["topology", "contiguous"]


def parallelize_branches(
    model: nn.Module,
    g: int | Mapping[str, int],
    common: Common = "all",
    order: Order = "topology",
) -> Placed:
    """Places the branches of a network on sub-grids of all processes of the default process group.

    Args:
        model: The whole network with its weights, equal on every process and on that process's
            device. It is modified in place.
        g: Number of sub-grids for each outermost section; sections inside branches are then not
            divided. Or a mapping from section names, or patterns such as `body.*.paths`, to numbers
            of sub-grids; sections that no pattern matches are not divided.
        common: Where the common layers are: `all` processes (D&SP), the `first` sub-grid
            (D&SP-cSub; there are as many sub-grids as the first section has), or a list of ranks.
        order: Which ranks form a sub-grid, see `whole`.

    Returns:
        This process's part of the network.

    Raises:
        TypeError: `model` is not a module, or it has no branches.
        ValueError: A section cannot be divided into that many sub-grids, a pattern matches no
            section, `common` names ranks that do not exist, or a weight is shared by modules on
            different processes.
        RuntimeError: The weights differ between processes.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"parallelize_branches needs a torch.nn.Module, not a {type(model).__name__}: {_REMEDY}"
        )
    n = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = Axis("world", n, rank)
    if isinstance(model, Branches):
        model = nn.Sequential(model)
    outermost = [name for name, _ in _sections(model)]
    if not outermost:
        raise TypeError(f"{type(model).__name__} has no branches to place on sub-grids: {_REMEDY}")
    main = _wanted(g, outermost[0], nested=False)
    everywhere = whole(n, main, order) if 1 <= main <= n else Grid(tuple(range(n)))
    if common == "all":
        source = everywhere
    elif common == "first":
        source = divide(everywhere, main)[0]
    else:
        source = Grid(tuple(common))
        if not set(source.ranks) <= set(everywhere.ranks):
            raise ValueError(f"common={[*source.ranks]}: the ranks must be in 0 to {n - 1}")
    plan = _Plan(g)
    plan.walk(model, everywhere, source, "", nested=False)
    names = [planned.row.section for planned in plan.sections]
    for pattern in g if isinstance(g, Mapping) else ():  # would silently leave all undivided
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"'{pattern}' in g matches no branch section{closest(pattern, names)}")
    if wrong := differing([*model.named_parameters()], world):
        few = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise RuntimeError(
            f"the processes' weights differ: {few}; call torch.manual_seed with the same seed on "
            "every process before the network is built"
        )
    return _carry_out(plan, model, source, rank, world)


@dataclass
class _Planned:
    """A section of the network, and the processes that will run it."""

    module: nn.Module  # contains the section
    path: str  # of the section in `module`
    plain: Branches
    source: Grid
    row: SectionRow

    def segments(self) -> list[tuple[int, ...]]:
        """Returns the groups of the segmented collectives; none if they do not apply."""
        grids = self.row.grids
        joined = tuple(rank for grid in grids for rank in grid.ranks)
        if len({len(grid) for grid in grids}) > 1:
            return []
        if self.source.ranks != joined and self.source != grids[0]:
            return []
        groups = [*zip(*(grid.ranks for grid in grids))]
        # torch orders the members of a group by rank.
        return groups if all([*group] == sorted(group) for group in groups) else []


class _Plan:
    """Which processes hold what. It is computed equally on every process and changes nothing."""

    def __init__(self, g: int | Mapping[str, int]) -> None:
        self.g = g
        self.sections: list[_Planned] = []
        self.grids: dict[nn.Parameter, Grid] = {}

    def walk(self, module: nn.Module, grid: Grid, source: Grid, name: str, nested: bool) -> None:
        """Plans a module that `grid` runs and whose parameters outside branches lie on `source`."""
        for path, plain in _sections(module):
            full = _name(name, path)
            costs = plain.work()
            try:
                grids = tuple(divide(grid, _wanted(self.g, full, nested)))
                held = assign(costs, [len(part) for part in grids])
            except ValueError as error:
                raise ValueError(f"section {full}: {error}") from None
            row = SectionRow(
                full, grids, held, [sum(costs[i] for i in branches) for branches in held]
            )
            self.sections.append(_Planned(module, path, plain, source, row))
            for part, branches in zip(grids, held):
                for i in branches:
                    holder = _Holder(plain.branches, str(i))
                    self.walk(holder, part, part, f"{full}.branches.{i}", nested=True)
        for owner, name_ in _outside(module):
            value = getattr(owner, name_)
            if not isinstance(value, nn.Parameter):
                continue
            if self.grids.setdefault(value, source) != source:
                raise ValueError(
                    f"{_name(name, name_)}: a weight is shared by modules that go to different "
                    "processes; give each module its own weight, or use fewer sub-grids"
                )

    def groups(self) -> list[tuple[int, ...]]:
        """Returns all groups that exchange anything, each once, equal on every process."""
        groups = [group for planned in self.sections for group in planned.segments()]
        groups += [_members(grid) for grid in self.grids.values()]
        return [*dict.fromkeys(group for group in groups if len(group) > 1)]


class _Holder(nn.Module):
    """Wraps one branch, so that a branch which is itself a section can be replaced."""

    def __init__(self, branches: nn.ModuleDict, key: str) -> None:
        super().__init__()
        # In a list, so that it is not registered as a submodule of this one.
        self._held_by, self._key = [branches], key
        self.add_module(_BRANCH, branches[key])

    def put(self, path: str, module: nn.Module) -> None:
        _put(self, path, module)
        self._held_by[0][self._key] = self.get_submodule(_BRANCH)


def _carry_out(plan: _Plan, model: nn.Module, source: Grid, rank: int, world: Axis) -> Placed:
    """Creates the groups, replaces the sections, and frees what belongs to other processes."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batch = SharedBatchSize()
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for ranks in plan.groups():  # torch requires every process to create all of them
        groups[ranks] = make_groups([ranks], "sub-grid") if len(ranks) < world.size else None

    def axis(name: str, ranks: tuple[int, ...]) -> Axis:
        if len(ranks) == 1:
            return Axis(name)
        return Axis(name, len(ranks), ranks.index(rank), groups[ranks])

    for planned in reversed(plan.sections):  # inner sections first
        row = planned.row
        if not any(rank in grid for grid in row.grids):
            continue
        mine = next((group for group in planned.segments() if rank in group), None)
        segment = axis("branch", mine) if mine else None
        section = Section(planned.source, row.grids, rank, world, device, segment)
        placed = PlacedBranches(planned.plain, section, row.branches, batch)
        if isinstance(planned.module, _Holder):
            planned.module.put(planned.path, placed)
        else:
            _put(planned.module, planned.path, placed)
    held = {p: grid for p, grid in plan.grids.items() if rank in grid}
    if rank not in source:
        _to_meta(model)
    by_grid: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter, grid in held.items():
        if parameter.requires_grad:
            by_grid.setdefault(_members(grid), []).append(parameter)
    order = [p for p in model.parameters() if p in held]  # the same order on all processes
    sums = GradientSums([(axis("sub-grid", ranks), ps) for ranks, ps in by_grid.items()], order)
    rows = [planned.row for planned in plan.sections]
    counted = [p for p in order if held[p].ranks[0] == rank]
    return Placed(model, source, rows, rank, world, device, order, counted, batch, sums)


def _to_meta(model: nn.Module) -> None:
    """Moves parameters and buffers outside branches to the meta device."""
    for owner, name in [*_outside(model)]:
        value = getattr(owner, name)
        meta = value.to("meta")
        if isinstance(value, nn.Parameter):
            meta = nn.Parameter(meta, requires_grad=value.requires_grad)
        setattr(owner, name, meta)


def _wanted(g: int | Mapping[str, int], name: str, nested: bool) -> int:
    """Returns the number of sub-grids that `g` asks for in a section."""
    if isinstance(g, int):
        return 1 if nested else g
    return next((n for pattern, n in g.items() if fnmatch.fnmatchcase(name, pattern)), 1)


def _members(grid: Grid) -> tuple[int, ...]:
    return tuple(sorted(grid.ranks))


def _put(module: nn.Module, path: str, child: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(module.get_submodule(parent), leaf, child)


def _sections(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Branches]]:
    """Yields the outermost sections of a module in order, with their paths."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, Branches):
            yield path, child
        else:
            yield from _sections(child, f"{path}.")


def _name(prefix: str, path: str) -> str:
    """Returns a section's name in the whole network, without the holders of branches."""
    inside = path.removeprefix(_BRANCH).removeprefix(".")
    return ".".join(part for part in (prefix, inside) if part)


def _outside(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yields the parameters and buffers outside sections, as (module, name in it)."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    names += [name for name, _ in module.named_buffers(recurse=False)]
    for name in names:
        yield module, name
    for child in module.children():
        if not isinstance(child, Branches | PlacedBranches):
            yield from _outside(child)


def whole(n: int, g: int, order: Order) -> Grid:
    """Returns all n processes in an order that `divide` cuts into the g sub-grids wanted.

    With `topology` neighboring ranks exchange tensors where sections begin and end, and with
    `contiguous` they form a sub-grid; see `gridformer.mesh.node_placement.sub_grids`.
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
    grids, start = [], 0
    for index in range(g):
        stop = start + small + (index < larger)
        grids.append(Grid(grid.ranks[start:stop]))
        start = stop
    return grids


def assign(costs: Sequence[float], sizes: Sequence[int]) -> list[list[int]]:
    """Assigns branches to sub-grids so that the largest work per process is small.

    Takes the branches from the costliest to the cheapest and gives each to the sub-grid where
    (assigned work + its cost) / size is smallest, the first of them in a tie, while ensuring that
    no sub-grid stays empty. This is Graham's LPT rule (1969). With sub-grids of equal size its
    result is at most 4/3 of the optimum.

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
