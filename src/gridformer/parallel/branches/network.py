"""Sub-graph parallelism for any network: its `Branches` go to sub-grids, the rest stays as written.

    torch.manual_seed(0)
    placed = parallelize_branches(Net(), g=4)                    # on every process
    for images, labels in batches:                      # whole batches, of any size
        x, y = placed.local(images), placed.local(labels)
        loss = F.cross_entropy(placed.model(x), y, reduction="sum") / len(images)
        placed.backward(loss)                           # gradients of the whole batch
        optimizer.step()

SUPER (Jain et al. 2021). Layers outside branches are data-parallel over all processes (D&SP) or
over the first sub-grid (D&SP-cSub); a branch belongs to one sub-grid, which runs it for the samples
of all. Inside a branch its sub-grid is all there is: sections there divide it again.

Where a process does not hold the common layers they are on torch's meta device: the network runs as
it is written, and gives shapes. So common layers must not look at values (`.item()`, `if x > 0`).
Layers that mix samples, as BatchNorm does, see those of one process only, here as in data
parallelism; GroupNorm and LayerNorm are exact. Dropout draws from each process's own generator:
seed it by rank once the network is placed.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from gridformer import comm
from gridformer.config import closest
from gridformer.mesh import Axis
from gridformer.mesh.groups import make_groups
from gridformer.models.branches import Branches
from gridformer.parallel.branches.grids import Grid, Order, assign, divide, whole
from gridformer.parallel.branches.placed import Batch, Placed, PlacedBranches, Row
from gridformer.parallel.branches.section import Section
from gridformer.parallel.data.gradients import GradientSums

_REMEDY = (
    "put modules that read the same input, or slices of it, and whose results are added up or "
    "joined, into gridformer.models.branches.Branches; gridformer's own models are cut by "
    "gridformer.parallel.build_parallel"
)
_BRANCH = "branch "  # no module can have this name
Common = Literal["all", "first"] | Sequence[int]


def parallelize_branches(
    model: nn.Module,
    g: int | Mapping[str, int],
    common: Common = "all",
    order: Order = "topology",
) -> Placed:
    """Put a network on sub-grids of all processes of the default group.

    Args:
        model: the same on every process, whole, with its weights, on its device. It is changed.
        g: sub-grids of each section that lies in no other; sections inside branches stay on their
            sub-grid undivided. Or sub-grids by section name, patterns such as `body.*.paths`
            allowed, for all sections; one that no pattern names stays undivided.
        common: `all` (D&SP), `first` (D&SP-cSub: the first of as many sub-grids as the first
            section has), or ranks.
        order: see `gridformer.parallel.branches.grids.whole`.

    Raises, before anything is sent, TypeError where there is nothing to divide, and ValueError
    where a section cannot be divided so; RuntimeError where the processes' weights differ.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a network is a torch.nn.Module, not a {type(model).__name__}: {_REMEDY}")
    n = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = Axis("world", n, rank)
    if isinstance(model, Branches):
        model = nn.Sequential(model)
    outermost = [name for name, _ in _sections(model)]
    if not outermost:
        raise TypeError(
            f"{type(model).__name__} has no branches that could be shared out: {_REMEDY}"
        )
    main = _wanted(g, outermost[0], nested=False)
    everywhere = whole(n, main, order) if 1 <= main <= n else Grid(tuple(range(n)))
    if common == "all":
        source = everywhere
    elif common == "first":
        source = divide(everywhere, main)[0]
    else:
        source = Grid(tuple(common))
        if not set(source.ranks) <= set(everywhere.ranks):
            raise ValueError(f"common={[*source.ranks]} names ranks beyond the {n} there are")
    plan = _Plan(g)
    plan.walk(model, everywhere, source, "", nested=False)
    _check_patterns(g, plan.sections)
    _check_equal(model, world)
    return _carry_out(plan, model, source, rank, world)


@dataclass
class _Planned:
    """A section of the whole network, on whichever processes it is to be."""

    module: nn.Module  # that contains it
    path: str  # there
    plain: Branches
    source: Grid
    row: Row

    def segments(self) -> list[tuple[int, ...]]:
        """The groups of its segmented collectives; none where there can be none (section.py)."""
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
    """Where everything of a network goes. The same on every process: nothing is sent or changed."""

    def __init__(self, g: int | Mapping[str, int]) -> None:
        self.g = g
        self.sections: list[_Planned] = []
        self.grids: dict[nn.Parameter, Grid] = {}

    def walk(self, module: nn.Module, grid: Grid, source: Grid, name: str, nested: bool) -> None:
        """What lies in `module`, whose processes are `grid`; outside branches it is on `source`."""
        for path, plain in _sections(module):
            full = _name(name, path)
            costs = plain.work()
            try:
                grids = tuple(divide(grid, _wanted(self.g, full, nested)))
                held = assign(costs, [len(part) for part in grids])
            except ValueError as error:
                raise ValueError(f"section {full}: {error}") from None
            row = Row(full, grids, held, [sum(costs[i] for i in branches) for branches in held])
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
                    "processes: give each its own, or take fewer sub-grids"
                )

    def groups(self) -> list[tuple[int, ...]]:
        """All groups of processes that exchange anything, each once, in one order."""
        found = [group for planned in self.sections for group in planned.segments()]
        found += [_members(grid) for grid in self.grids.values()]
        return [*dict.fromkeys(group for group in found if len(group) > 1)]


class _Holder(nn.Module):
    """Stands around one branch, so that a branch which is itself a section can be replaced."""

    def __init__(self, branches: nn.ModuleDict, key: str) -> None:
        super().__init__()
        self._held_by, self._key = [branches], key  # in a list: not a module of this one
        self.add_module(_BRANCH, branches[key])

    def put(self, path: str, module: nn.Module) -> None:
        _put(self, path, module)
        self._held_by[0][self._key] = self.get_submodule(_BRANCH)


def _carry_out(plan: _Plan, model: nn.Module, source: Grid, rank: int, world: Axis) -> Placed:
    """Make the groups, replace the sections, and let go of what belongs to other processes."""
    device, batch = _device(model), Batch()
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for ranks in plan.groups():  # every process makes all of them, as torch wants
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
    order = [p for p in model.parameters() if p in held]  # one on all processes that share some
    sums = GradientSums([(axis("sub-grid", ranks), ps) for ranks, ps in by_grid.items()], order)
    rows = [planned.row for planned in plan.sections]
    counted = [p for p in order if held[p].ranks[0] == rank]
    return Placed(model, source, rows, rank, world, device, order, counted, batch, sums)


def _to_meta(model: nn.Module) -> None:
    """What lies outside branches is elsewhere: only its shapes stay."""
    for owner, name in [*_outside(model)]:
        value = getattr(owner, name)
        meta = value.to("meta")
        if isinstance(value, nn.Parameter):
            meta = nn.Parameter(meta, requires_grad=value.requires_grad)
        setattr(owner, name, meta)


def _check_patterns(g: int | Mapping[str, int], sections: Sequence[_Planned]) -> None:
    """A pattern that fits no section would leave it undivided without a word."""
    names = [planned.row.section for planned in sections]
    for pattern in g if isinstance(g, Mapping) else ():
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"g names '{pattern}', which no section is called{closest(pattern, names)}"
            )


def _wanted(g: int | Mapping[str, int], name: str, nested: bool) -> int:
    """How many sub-grids a section is to have."""
    if isinstance(g, int):
        return 1 if nested else g
    return next((n for pattern, n in g.items() if fnmatch.fnmatchcase(name, pattern)), 1)


def _members(grid: Grid) -> tuple[int, ...]:
    return tuple(sorted(grid.ranks))


def _put(module: nn.Module, path: str, child: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(module.get_submodule(parent), leaf, child)


def _sections(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Branches]]:
    """The sections in a module that lie in no other, with their paths, in order."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, Branches):
            yield path, child
        else:
            yield from _sections(child, f"{path}.")


def _name(prefix: str, path: str) -> str:
    """A section's name in the whole network; the holder of a branch has none."""
    inside = path.removeprefix(_BRANCH).removeprefix(".")
    return ".".join(part for part in (prefix, inside) if part)


def _outside(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Parameters and buffers that lie in no section: their modules and names there."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    names += [name for name, _ in module.named_buffers(recurse=False)]
    for name in names:
        yield module, name
    for child in module.children():
        if not isinstance(child, Branches | PlacedBranches):
            yield from _outside(child)


def _check_equal(model: nn.Module, world: Axis) -> None:
    """Different weights on different processes would train, and towards nothing."""
    named = [*model.named_parameters()]
    if world.size == 1 or not named:
        return
    sums = torch.stack([p.detach().double().abs().sum() for _, p in named])
    low = comm.all_reduce(sums.clone(), world, "min", "sanity")
    high = comm.all_reduce(sums, world, "max", "sanity")
    wrong = [name for (name, _), same in zip(named, (low == high).tolist()) if not same]
    if wrong:
        few = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise RuntimeError(
            f"the processes' weights differ: {few}; give torch.manual_seed the same seed on all "
            "before the network is built"
        )


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
