"""Checks whether a run fits into its devices' memory, and finds the nearest settings that do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gridformer.checkpoint.snapshot import saves_meanwhile
from gridformer.config import RunConfig
from gridformer.memory.analytic import quick_estimate, states_of, total_states
from gridformer.memory.breakdown import STATES, MemoryBreakdown
from gridformer.memory.estimate import estimate_ranks, on_gpu
from gridformer.memory.ranks import largest_ranks
from gridformer.mesh.gpus import gpus_here
from gridformer.mesh.launch_env import joined
from gridformer.models import count_parameters
from gridformer.parallel.auto.decisions import Decisions, decide_run, work_of
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.offers import Changes, with_changes
from gridformer.parallel.registry import spec_of
from gridformer.parallel.validation import broken_rules
from gridformer.utils.hardware import free_memory
from gridformer.utils.units import GIB, format_bytes, format_setting

# Called with what was found, which may be empty, and with what begins now.
Tell = Callable[[str, str], None]

SEARCH_S = 20.0  # seconds to search for settings that fit; a user waits for it

OWN_CPU = GIB * 2 // 5  # bytes that a process holds before any tensor
OWN_CUDA = GIB  # bytes of the driver's context and of NCCL's buffers
USABLE = 0.95  # fraction of a GPU that a caching, rounding allocator can give to tensors


def silent(found: str, doing: str) -> None:
    """A `Tell` that ignores everything, for callers without a terminal."""


@dataclass(frozen=True)
class Room:
    """The budget of one process.

    Attributes:
        n_bytes: The bytes that the tensors of one process may take.
        why: Where that number comes from, as part of a sentence.
    """

    n_bytes: int
    why: str


def room_of(run: RunConfig) -> Room | None:
    """Returns the budget of each process on this machine, or None if it is not known."""
    if run.train.memory_gib:
        gib = run.train.memory_gib
        return Room(round(gib * GIB), f"train.memory_gib={gib:g}")
    place, gpus = joined(), _gpus_of(run)
    n_here = place.local_size if place else run.layout.n_processes
    if gpus:
        least = min(torch.cuda.get_device_properties(i).total_memory for i in gpus)
        usable = round(least * USABLE) - OWN_CUDA
        return Room(
            usable,
            f"{format_bytes(usable)} of a GPU's {format_bytes(least)} are available to tensors",
        )
    free = free_memory()
    if free is None:
        return None
    share = max(0, free // n_here - OWN_CPU)
    own = f"each takes {format_bytes(OWN_CPU)} for itself"
    return Room(
        share,
        f"{format_bytes(share)} are left for each of {n_here} processes, with "
        f"{format_bytes(free)} free here, of which {own}",
    )


def _gpus_of(run: RunConfig) -> list[int]:
    """Returns the GPUs that a run started now would use on this machine."""
    return gpus_here(joined(), run.layout.n_processes) if run.train.device != "cpu" else []


def fit_problems(
    run: RunConfig,
    tell: Tell = silent,
    decisions: Decisions | None = None,
    room: Room | None = None,
) -> list[str]:
    """Returns why a checked run does not fit into its budget, with settings that do.

    Memory is only estimated if cheap bounds do not already give the answer.

    Args:
        run: The checked run.
        tell: Called at once with what was found and what begins now, since finding settings that
            fit may take a while.
        decisions: The result of `decide_run(run)`; None calls it.
        room: The budget of each process; None means that of the processes on this machine.

    Returns:
        At most one problem; none if the run fits or the budget is not known.
    """
    if room is None:
        room = room_of(run)
        if run.train.device == "auto" and not _gpus_of(run):  # though there may be some here
            on_cpu = run.train.model_copy(update={"device": "cpu"})
            run = run.model_copy(update={"train": on_cpu})
    if room is None or at_most(run) <= room.n_bytes:
        return []
    if states_of(run) > room.n_bytes:
        return [refusal(run, None, room, tell)]
    tell("", "looking whether it fits into memory")
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
        tell: Called at once with what was found, because the search for settings takes a while.
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
    found = nearest(run, worst, room.n_bytes, patience=patience)
    if found:
        offers = (f"{offer.settings} ({format_bytes(offer.peak)})" for offer in found)
        return text + "use " + ", or ".join(offers)
    if patience.is_over:
        text += f"no setting that was tried within {SEARCH_S:g} s fits; "
        if likely := _likely(run, worst, room.n_bytes):
            return text + (
                f"try {likely.settings} (by formula about {format_bytes(likely.peak)}; run "
                "`gridformer memory` for the exact number)"
            )
        return text + "use a layout of more devices"
    if worst is None:
        devices = math.ceil(total_states(run) / max(1, room.n_bytes))
        return text + (
            f"no setting that saves memory is enough; use a layout of {devices:,} or more "
            "devices of this size"
        )
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
        other = changed(run, changes)
        if other is None:
            return None
        bound = states_of(other)
        if bound > n_bytes:
            return bound
        if patience.ends():
            return None
        decisions = decide_run(other)
        if worst is not None:
            found = estimate_ranks(other, [worst.rank], decisions)[0].needed
            if found > n_bytes or run.layout.pp == 1:
                return found
        # With the changes another stage may be the fullest.
        ranks = [*largest_ranks(other, decisions)]
        return max(breakdown.needed for breakdown in estimate_ranks(other, ranks, decisions))

    found: list[Offer] = []
    saves: list[Changes] = []
    for change in _cheapest_first(run):
        if any(offer.changes.keys() == change.keys() for offer in found):
            continue  # a milder value of the same setting is enough
        size = peak(change)
        if size is not None and size <= n_bytes:
            found.append(Offer(change, round(size)))
            if len(found) == at_most:
                return found
        elif size is not None and size < most:
            saves.append(change)
    if found:
        return found
    together: Changes = {}
    for change in saves:
        together |= change
        size = peak(together)
        if size is not None and size <= n_bytes:
            return [Offer(together, round(size))]
    for batch in _smaller_batches(run):
        size = peak(together | batch)
        if size is not None and size <= n_bytes:
            return [Offer(together | batch, round(size))]
    return []


def _likely(run: RunConfig, worst: MemoryBreakdown | None, n_bytes: int) -> Offer | None:
    """Returns the first setting with which the run should fit by formula, or several together."""
    scale = worst.needed / quick_estimate(run) if worst else 1.0
    ways, together = [*_cheapest_first(run)], Changes()
    sums = []
    for change in ways:
        together = together | change
        sums.append(together)
    for changes in [*ways, *sums]:
        other = changed(run, changes)
        if other is not None and (size := quick_estimate(other) * scale) <= n_bytes:
            return Offer(changes, round(size))
    return None


def _cheapest_first(run: RunConfig) -> Iterator[Changes]:
    """Yields settings that save memory, the least slowdown first, the mildest value first."""
    layout, train = run.layout, run.train
    if saves_meanwhile(train) and not on_gpu(run):
        yield {"train.async_save": False}
    if train.loss_chunk_tokens == 0 or train.loss_chunk_tokens > 256:
        yield {"train.loss_chunk_tokens": 256}
    choices = decide(run.model, layout, work_of(run))
    if choices.work.itemsize == 2 and choices.cast_once:
        yield {"train.cast": "use"}
    free, slower = spec_of(layout).savings(layout)
    yield from free
    if layout.dp > 1 and layout.dp_mode == "replicate":
        yield {"layout.dp_mode": "zero1"}
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
    if train.recompute != "full":
        yield {"train.recompute": "full"}
    if train.offload == "none" and on_gpu(run):
        yield {"train.offload": "optimizer"}


def _smaller_batches(run: RunConfig) -> Iterator[Changes]:
    batch = run.train.global_batch // 2
    while batch:
        yield {"train.global_batch": batch}
        batch //= 2


def changed(run: RunConfig, changes: Mapping[str, Any]) -> RunConfig | None:
    """Returns the run with other values, or None if they make it invalid."""
    other = with_changes(run, changes)
    return None if other is None or broken_rules(other) else other


def at_most(run: RunConfig) -> int:
    """Returns an upper bound of the bytes that any rank of the run holds at a time.

    It assumes that nothing is sharded over the grid, and several times as many activations as any
    block keeps.
    """
    model, layout, train = run.model, run.layout, run.train
    parameters = count_parameters(model)
    size = 8 if train.dtype == "float64" else 4
    sequences = train.global_batch // (layout.dp * layout.micro_batches)
    under_way = layout.micro_batches if layout.pp > 1 else 1
    s, source = run.seq_len, run.source_len
    wide = 40 * model.hidden_size + 20 * model.n_heads * model.head_width
    wide += (12 + 12 * model.gated) * model.ffn_size
    scores = 16 * model.n_heads * (s * s + s * source + source * source)
    stacks = 2 if model.two_stacks else 1
    a_layer = sequences * (wide * (s + source) + scores) * stacks
    logits = 12 * sequences * s * model.vocab_size
    # The integers from which dropout masks are made: 8 bytes each, many per element.
    masks = 16 * 8 * sequences * ((s + source) * max(model.hidden_size, model.ffn_size) + scores)
    activations = (a_layer * (model.n_layers + 1) * under_way + logits) * size
    states = 10 + 3 * saves_meanwhile(train)
    return states * parameters * size + activations + masks
