"""The largest batch that fits, found by estimating, and what real processes hold with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.memory.cases import SCALINGS, schemes
from benchmarks.memory.measure import measure_rank
from gridformer.config import LayoutConfig, RunConfig
from gridformer.memory.estimate import MemoryBreakdown, estimate_rank
from gridformer.memory.ranks import largest_ranks
from gridformer.mesh.process_group import close_process_groups, init_process_groups
from gridformer.parallel.registry import spec_of


@dataclass(frozen=True)
class Limit:
    """The largest batch of a case under its budget.

    Attributes:
        batch: The largest batch, in sequences.
        unit: What batches are multiples of.
        peak: Estimated bytes of the fullest rank with this batch.
        more: The same with the next larger batch.
        states: Estimated bytes that this rank holds between steps.
    """

    batch: int
    unit: int
    peak: int
    more: int
    states: int


def peak_of(run: RunConfig) -> int:
    """Return the estimated bytes of the fullest rank."""
    return max(estimate_rank(run, rank).peak for rank in largest_ranks(run))


def largest_batch(scaling_name: str, processes: int, title: str) -> Limit:
    """Search the largest batch of a scheme's layout under the budget of a scaling."""
    scaling = SCALINGS[scaling_name]
    layout = schemes(processes)[title]
    return search(partial(scaling.run, layout), spec_of(layout).batch_parts(layout), scaling.budget)


def search(run_of: Callable[[int], RunConfig], unit: int, budget: int) -> Limit:
    """Search the largest batch along the line through two peaks.

    Peaks rise linearly with the batch once activations dominate, so a few estimates are enough.

    Args:
        run_of: Returns the run with a batch.
        unit: What batches are multiples of.
        budget: The bytes that a process may hold.
    """
    found: dict[int, MemoryBreakdown] = {}

    def peak(units: int) -> int:
        if units not in found:
            run = run_of(units * unit)
            each = [estimate_rank(run, rank) for rank in largest_ranks(run)]
            found[units] = max(each, key=lambda breakdown: breakdown.peak)
        return found[units].peak

    if peak(1) > budget:
        return Limit(0, unit, peak(1), peak(1), found[1].between)
    low, high = 1, 8
    while peak(high) <= budget:
        # bytes per unit; the next estimate follows this line
        rise = (peak(high) - peak(low)) / (high - low)
        beyond = int((budget - peak(high)) / rise) + 1 if rise > 0 else 3 * high
        low, high = high, high + min(beyond, 15 * high)
    while high - low > 1:  # try where the line through both ends meets the budget, or the next unit
        rise = (budget - peak(low)) / (peak(high) - peak(low))
        units = min(max(low + int(rise * (high - low)), low + 1), high - 1)
        if peak(units) > budget:
            high = units
        else:
            low = units
            if peak(units + 1) > budget:
                high = units + 1
    return Limit(low * unit, unit, peak(low), peak(high), found[low].between)


def measure(run: RunConfig, out: Path) -> None:
    """Measure a run; the entrypoint of every process. Rank 0 writes the fullest rank's peak."""
    world = init_process_groups("cpu", run.layout.n_processes, 600.0)
    torch.set_num_threads(1)
    _, peak = measure_rank(run)
    if world.size > 1:
        every: list[int] = [0] * world.size
        torch.distributed.all_gather_object(every, peak)
        peak = max(every)
    if world.rank == 0:
        out.write_text(str(peak))
    close_process_groups()


def share(layout: LayoutConfig, batch: int, scaling_name: str, recompute: str) -> float:
    """Return p times the fullest rank's peak, divided by one device's for the same batch."""
    scaling = SCALINGS[scaling_name]
    model = scaling.model(layout.n_processes)
    peaks = []
    for each in (layout, LayoutConfig()):
        run = scaling.run(layout, batch)
        train = run.train.model_copy(update={"recompute": recompute})
        run = run.model_copy(update={"layout": each, "model": model, "train": train})
        peaks.append(peak_of(run))
    return peaks[0] * layout.n_processes / peaks[1]
