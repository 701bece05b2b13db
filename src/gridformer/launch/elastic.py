"""`train.elastic`: another layout of the same run for the number of processes that are there.

With `layout.cluster` the planner searches for the fastest layout there. Otherwise the layout
changes as little as possible: it has as many processes as possible, keeps the scheme and the grid
where they fit, and drops replicas first. The global batch stays, so losses are the same up to
rounding.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from gridformer.cluster.file import load_cluster
from gridformer.config import LayoutConfig, RunConfig, divisors
from gridformer.mesh.gpus import gpus_are_shared
from gridformer.mesh.launch_env import rank_env
from gridformer.parallel.registry import describe_layout, spec_of
from gridformer.parallel.validation import violations, with_rows_over
from gridformer.utils.errors import ConfigError

if TYPE_CHECKING:
    from gridformer.memory.room import Room

_TRIED = 30  # layouts of a number of processes whose memory is estimated
_IMPROVED = 4  # layouts whose settings the planner improves


def with_processes(run: RunConfig, nproc: int | None = None) -> RunConfig:
    """Returns a run with a layout for the processes that are there, and says so if it is another.

    Raises:
        ConfigError: No layout works.
    """
    wanted, present = run.layout, processes_present(run, nproc)
    if present == wanted.n_processes:
        return run
    best = _best(run, present)
    layout = best.layout
    idle = present - layout.n_processes
    before, after = (f"{describe_layout(one)}, m={one.micro_batches}" for one in (wanted, layout))
    print(
        f"gridformer: ELASTIC: {present} process{'es' * (present > 1)} instead of "
        f"{wanted.n_processes}: layout {before} becomes {after}"
        + (f", with {idle} left over" if idle else "")
        + f"; the global batch stays {run.train.global_batch}",
        file=sys.stderr,
        flush=True,
    )
    return best


def processes_present(run: RunConfig, nproc: int | None = None) -> int:
    """Returns how many processes a launcher has started, or a run can start here.

    These are as many as `nproc` says or the layout needs, but not more than the GPUs that it uses.
    """
    place = rank_env()
    if place:
        return place.size
    if nproc is not None or run.train.device == "cpu" or run.layout.n_processes == 1:
        return nproc or run.layout.n_processes
    import torch

    if gpus_are_shared():
        return run.layout.n_processes
    return min(run.layout.n_processes, torch.cuda.device_count() or run.layout.n_processes)


def _best(run: RunConfig, present: int) -> RunConfig:
    """Returns the run on the best layout of at most that number of processes."""
    from gridformer.memory.room import room_of

    for n in range(present, 0, -1):
        for other in islice(layouts_for(run, n), _TRIED):
            if _fits(other, room_of(other)):
                return other
    raise ConfigError(
        f"train.elastic: no layout of at most {present} processes is valid for this run and "
        f"fits into memory: start {run.layout.n_processes} for {describe_layout(run.layout)}"
    )


def layouts_for(run: RunConfig, n: int) -> Iterator[RunConfig]:
    """Yields valid runs on n processes, the preferred one first."""
    if run.layout.cluster:
        from gridformer.plan.search import Search

        ranked, _ = Search(run, load_cluster(run.layout.cluster), n).ranked(_IMPROVED)
        for one in ranked:
            layout = one.run.layout.model_copy(update={"cluster": run.layout.cluster})
            other = one.run.model_copy(update={"layout": layout})
            if not violations(other):
                yield with_rows_over(other)
        return
    from gridformer.memory.layouts import candidates

    runs = [valid for layout in candidates(n) if (valid := _carried_over(run, layout))]
    yield from sorted(runs, key=lambda one: _change(run.layout, one.layout))


def _change(old: LayoutConfig, new: LayoutConfig) -> tuple[Any, ...]:
    """Returns how much a layout changes, as a key for sorting."""
    schemes = {old.scheme, new.scheme}
    grids = [(layout.rows, layout.cols, layout.branches) for layout in (old, new)]
    shards = [math.prod(grid) * layout.pp for grid, layout in zip(grids, (old, new))]
    # More shards of the model rather than fewer: they need less memory.
    further = abs(math.log(shards[1] / shards[0])), -shards[1]
    return len(schemes), grids[0] != grids[1], new.pp != old.pp, *further


def _carried_over(run: RunConfig, arrangement: LayoutConfig) -> RunConfig | None:
    """Returns the run on another arrangement, with as many of its settings as are valid there."""
    old = run.layout
    placed = {"rows", "cols", "branches", "dp", "pp", "scheme"}
    new = {name: getattr(arrangement, name) for name in placed}
    if new["pp"] != old.pp:
        new |= {"stages_per_rank": 1, "pipeline": "auto"}
    alone = {"devices_per_node": 0, "nodes_per_rack": 0}
    plain = LayoutConfig.model_validate(arrangement.model_dump() | {"dp_mode": old.dp_mode})
    for base in (
        old.model_copy(update=new),
        old.model_copy(update=new | alone),
        plain,
        plain.model_copy(update={"dp_mode": "replicate"}),
    ):
        for micro_batches in _micro_batches(run, base)[:3]:
            layout = base.model_copy(update={"micro_batches": micro_batches})
            other = run.model_copy(update={"layout": layout})
            if not violations(other):
                return with_rows_over(other)
    return None


def _micro_batches(run: RunConfig, layout: LayoutConfig) -> list[int]:
    """Returns numbers of micro-batches, first those whose micro-batches are at most as large."""
    batch, here = run.train.global_batch, spec_of(layout).batch_parts(layout)
    if batch % here:
        return []
    before = run.layout
    most = batch // (spec_of(before).batch_parts(before) * before.micro_batches)
    return sorted(
        divisors(batch // here), key=lambda m: (batch // here > most * m, m < layout.pp, m)
    )


def _fits(run: RunConfig, room: Room | None) -> bool:
    from gridformer.memory.estimate import estimate_ranks
    from gridformer.memory.quick import states_of
    from gridformer.memory.ranks import largest_ranks
    from gridformer.memory.room import upper_bound
    from gridformer.parallel.auto.decisions import decide_run

    if room is None or upper_bound(run) <= room.n_bytes:
        return True
    if states_of(run) > room.n_bytes:
        return False
    decisions = decide_run(run)
    ranks = estimate_ranks(run, [*largest_ranks(run, decisions)], decisions)
    return max(rank.needed for rank in ranks) <= room.n_bytes
