"""Checks whether a run fits into its devices' memory, and finds the nearest settings that do."""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gridformer.config import RunConfig
from gridformer.memory.estimate import MemoryBreakdown, estimate_ranks
from gridformer.memory.quick import quick_estimate, states_of, total_states
from gridformer.memory.ranks import largest_ranks
from gridformer.memory.room import (
    Room,
    Tell,
    enough_devices,
    gpus_of,
    on_gpu,
    room_of,
    silent,
    upper_bound,
)
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.products import replica_work
from gridformer.parallel.fixes import Changes, with_changes
from gridformer.parallel.registry import spec_of
from gridformer.parallel.validation import violations, with_rows_over
from gridformer.record.step import STATES
from gridformer.utils.units import format_bytes, format_setting

SEARCH_S = 20.0  # seconds to search for settings that fit; a user waits for it


def fit_problems(
    run: RunConfig,
    tell: Tell = silent,
    decisions: Decisions | None = None,
    room: Room | None = None,
) -> list[str]:
    """Returns why a checked run does not fit into its budget, with settings that do.

    Memory is only estimated if cheap bounds do not already give the answer. There is at most one
    problem; none if the run fits or the budget is not known.

    Args:
        run: The checked run.
        tell: Called at once with what was found and what begins now.
        decisions: The result of `decide_run(run)`; None calls it.
        room: The budget of each process; None means that of the processes on this machine.
    """
    if room is None:
        room = room_of(run)
        if run.train.device == "auto" and not gpus_of(run):  # though there may be some here
            on_cpu = run.train.model_copy(update={"device": "cpu"})
            run = run.model_copy(update={"train": on_cpu})
    if room is None or upper_bound(run) <= room.n_bytes:
        return []
    if states_of(run) > room.n_bytes:
        return [refusal(run, None, room, tell)]
    tell("", "checking whether it fits into memory")
    began = time.monotonic()
    decisions = decisions or decide_run(run)
    breakdowns = estimate_ranks(run, [*largest_ranks(run, decisions)], decisions)
    worst = max(breakdowns, key=lambda breakdown: breakdown.needed)
    if worst.needed <= room.n_bytes:
        return []
    return [refusal(run, worst, room, tell, time.monotonic() - began)]


def refusal(
    run: RunConfig,
    worst: MemoryBreakdown | None,
    room: Room,
    tell: Tell = silent,
    took: float = 0.0,
) -> str:
    """Returns the message that a run does not fit: what it holds, and settings that fit.

    Args:
        run: The checked run.
        worst: The breakdown of the fullest rank; None if the budget is too small for parameters,
            gradients and optimizer alone.
        room: The budget.
        tell: Called at once with what was found and what begins now.
        took: Seconds that the estimate took. The search stops when another such estimate would
            exceed its time.
    """
    if worst is None:
        alone = format_bytes(states_of(run))
        short = text = f"a rank would hold {alone} of parameters, gradients and optimizer alone"
    else:
        short = f"rank {worst.rank} would hold {format_bytes(worst.needed)} at a time"
        states = sum(worst.by_kind.get(kind, 0) for kind in STATES)
        copies = ""
        if worst.needed > worst.peak:
            copies = f", {format_bytes(worst.saved)} of copies while it saves"
        text = (
            f"{short} ({worst.moment}): {format_bytes(states)} of parameters, gradients and "
            f"optimizer, {format_bytes(worst.activations)} of activations{copies}, and more"
        )
    text += f"; but {room.why}: "
    said = f"It does not fit: {short}; but {room.why}."
    looking = partial(tell, said, f"looking for settings that do, {SEARCH_S:g} s at most")
    patience = Patience(time.monotonic() + SEARCH_S, took, looking)
    if offers := nearest(run, worst, room.n_bytes, patience=patience):
        words = (f"{offer.settings} ({format_bytes(offer.peak)})" for offer in offers)
        return text + "use " + ", or ".join(words)
    if patience.is_over:
        text += f"no setting that was tried within {SEARCH_S:g} s fits; "
        if likely := _likely(run, worst, room.n_bytes):
            return text + (
                f"try {likely.settings} (by formula about {format_bytes(likely.peak)}; run "
                "`gridformer memory` for the exact number)"
            )
        return text + "use a layout of more devices"
    if worst is None:
        return text + enough_devices(total_states(run), room)
    return text + "no setting that saves memory is enough; use a layout of more devices"


@dataclass
class Patience:
    """The time limit of the search for settings.

    Attributes:
        until: When the search ends, by time.monotonic.
        longest: Seconds that the slowest estimate took so far.
        begins: Called before the first setting is tried.
        is_over: Whether the search has ended because of the limit.
    """

    until: float = math.inf
    longest: float = 0.0
    begins: Callable[[], None] | None = None
    is_over: bool = False
    _last: float = field(default_factory=time.monotonic)

    def ends(self) -> bool:
        """Returns whether there is no time for another setting. Call it before trying each."""
        if self.begins is not None:
            self.begins()
            self.begins = None
        now = time.monotonic()
        self.longest, self._last = max(self.longest, now - self._last), now
        self.is_over = self.is_over or now + self.longest > self.until
        return self.is_over


@dataclass(frozen=True)
class Offer:
    """Changes with which a run fits, and its peak with them in bytes."""

    changes: Changes
    peak: int

    @property
    def settings(self) -> str:
        """The changes as command-line overrides of a run file."""
        return " ".join(format_setting(*change) for change in self.changes.items())


def nearest(
    run: RunConfig,
    worst: MemoryBreakdown | None,
    n_bytes: int,
    at_most: int = 3,
    patience: Patience | None = None,
) -> list[Offer]:
    """Finds settings with which a run fits, keeping the layout and, if possible, the batch.

    It tries single settings first, the cheapest of them first; if none is enough, several together;
    and finally smaller batches as well.

    Args:
        run: The checked run.
        worst: The breakdown of the fullest rank, or None; see `refusal`.
        n_bytes: The budget of a rank in bytes.
        at_most: The most offers to return.
        patience: The time limit; None tries everything.
    """
    patience = patience or Patience()
    most = worst.needed if worst else math.inf

    def peak(changes: Changes) -> float | None:
        """Returns the peak with changes: a lower bound if that is already too much.

        None means that the changed run is not valid, or that the time is over.
        """
        other = valid_change(run, changes)
        if other is None:
            return None
        bound = states_of(other)
        if bound > n_bytes:
            return bound
        if patience.ends():
            return None
        decisions = decide_run(other)
        if worst is not None:
            needed = estimate_ranks(other, [worst.rank], decisions)[0].needed
            if needed > n_bytes or run.layout.pp == 1:
                return needed
        # With the changes another stage may be the fullest.
        ranks = [*largest_ranks(other, decisions)]
        return max(breakdown.needed for breakdown in estimate_ranks(other, ranks, decisions))

    offers: list[Offer] = []
    saves: list[Changes] = []
    for change in cheapest_first(run):
        if any(offer.changes.keys() == change.keys() for offer in offers):
            continue  # a milder value of the same setting is enough
        size = peak(change)
        if size is not None and size <= n_bytes:
            offers.append(Offer(change, round(size)))
            if len(offers) == at_most:
                return offers
        elif size is not None and size < most:
            saves.append(change)
    if offers:
        return offers
    sums = [*itertools.accumulate(saves, operator.or_, initial=Changes())]
    for changes in [*sums[1:], *(sums[-1] | batch for batch in smaller_batches(run))]:
        size = peak(changes)
        if size is not None and size <= n_bytes:
            return [Offer(changes, round(size))]
    return []


def _likely(run: RunConfig, worst: MemoryBreakdown | None, n_bytes: int) -> Offer | None:
    """Returns the first setting with which the run should fit by formula, or several together."""
    scale = worst.needed / quick_estimate(run) if worst else 1.0
    ways = [*cheapest_first(run)]
    for changes in [*ways, *itertools.accumulate(ways, operator.or_)]:
        other = valid_change(run, changes)
        if other is not None and (size := quick_estimate(other) * scale) <= n_bytes:
            return Offer(changes, round(size))
    return None


# ------------------------------------------------------------- settings that save memory


def cheapest_first(run: RunConfig) -> Iterator[Changes]:
    """Yields settings that save memory, the least slowdown first, the mildest value first."""
    layout, train = run.layout, run.train
    if train.saves_meanwhile and not on_gpu(run):
        yield {"train.async_save": False}
    if train.loss_chunk_tokens == 0 or train.loss_chunk_tokens > 256:
        yield {"train.loss_chunk_tokens": 256}
    choices = decide(run.model, layout, replica_work(run))
    if choices.work.itemsize == 2 and choices.cast_once:
        yield {"train.cast": "use"}
    free, slower = spec_of(layout).savings(layout)
    yield from free
    if layout.dp > 1 and layout.dp_mode == "replicate":
        yield {"layout.dp_mode": "zero1"}
    if layout.dp_mode != "replicate" and layout.micro_batches > 1:
        yield {"layout.gradient_sync": "micro_batch"}
    if layout.shard_over:
        yield {"layout.shard_over": 0}
    if choices.reshard == "step":
        yield {"layout.reshard": "layer"}
    if train.recompute == "none":
        yield {"train.recompute": "selective"}
    if train.update == "after_backward" and layout.micro_batches == 1:
        by_layer = {"train.clip_by": "layer"} if train.clip_norm else {}
        yield {"train.update": "in_backward"} | by_layer
    for factor in (2, 4, 8, 16):
        yield {"layout.micro_batches": layout.micro_batches * factor}
    yield from slower
    if layout.dp > 1 and layout.dp_mode != "fsdp":
        yield {"layout.dp_mode": "fsdp"}
    if not train.recomputes_blocks:
        yield {"train.recompute": "except_attention"}
    if train.recompute_layers:
        yield {"train.recompute_layers": 0}
    if train.recompute != "full":
        yield {"train.recompute": "full"}
    if train.offload == "none" and on_gpu(run):
        yield {"train.offload": "optimizer"}


def smaller_batches(run: RunConfig) -> Iterator[Changes]:
    """Yields smaller global batches, the largest first."""
    batch = run.train.global_batch // 2
    while batch:
        yield {"train.global_batch": batch}
        batch //= 2


def valid_change(run: RunConfig, changes: Mapping[str, Any]) -> RunConfig | None:
    """Returns the run with other values by dotted key, or None if they make it invalid."""
    other = with_changes(run, changes)
    return None if other is None or violations(other) else with_rows_over(other)
