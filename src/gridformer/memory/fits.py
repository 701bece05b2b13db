"""Whether a run fits into its devices, and if not, the nearest settings that do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gridformer.config import RunConfig, as_yaml
from gridformer.decisions import Decisions, decide_run
from gridformer.hardware import GIB, free_memory
from gridformer.launch import joined
from gridformer.layout import broken_rules
from gridformer.memory.account import Account
from gridformer.memory.foretell import foretell, on_gpu
from gridformer.memory.ranks import largest_ranks
from gridformer.models import build_model
from gridformer.offers import Changes, with_changes
from gridformer.parallel.registry import spec_of

OWN_CPU = GIB * 2 // 5  # what a process holds before any tensor
OWN_CUDA = GIB  # the driver's context, NCCL's buffers
USABLE = 0.95  # of a GPU: what an allocator that caches and rounds can give out


@dataclass(frozen=True)
class Room:
    """Bytes that the tensors of one process may take, and where that is from."""

    n_bytes: int
    why: str


def room_of(run: RunConfig) -> Room | None:
    """What this machine has for each of its processes; None if it does not tell."""
    if run.train.memory_gib:
        gib = run.train.memory_gib
        return Room(round(gib * GIB), f"train.memory_gib={gib:g}")
    place = joined()
    n_here = place.local_size if place else run.layout.n_processes
    gpus = torch.cuda.device_count() if run.train.device != "cpu" else 0
    if gpus >= n_here:
        least = min(torch.cuda.get_device_properties(i).total_memory for i in range(n_here))
        usable = round(least * USABLE) - OWN_CUDA
        return Room(usable, f"{in_gib(usable)} of a GPU's {in_gib(least)} can be given to tensors")
    free = free_memory()
    if free is None:
        return None
    share = max(0, free // n_here - OWN_CPU)
    own = f"{n_here} processes, which take {in_gib(OWN_CPU)} each for themselves"
    return Room(share, f"{in_gib(share)} each are left, with {in_gib(free)} free here and {own}")


def fit_problems(run: RunConfig, decisions: Decisions | None = None) -> list[str]:
    """Why a checked run cannot fit on this machine, with settings that do; mostly none.

    The account is only taken where a bound that costs nothing does not already say that it fits.
    decisions: what `decide_run` said of the run; it is asked if they are not given.
    """
    place = joined()
    if place and place.local_rank > 0:  # the first process of a machine speaks for all of them
        return []
    room = room_of(run)
    if room is None or at_most(run) <= room.n_bytes:
        return []
    decisions = decisions or decide_run(run)
    accounts = foretell(run, [*largest_ranks(run, decisions)], decisions)
    worst = max(accounts, key=lambda account: account.peak)
    if worst.peak <= room.n_bytes:
        return []
    return [refusal(run, worst, room)]


def refusal(run: RunConfig, worst: Account, room: Room) -> str:
    """That it does not fit, of what it consists, and what would."""
    states = sum(worst.by_kind.get(kind, 0) for kind in ("parameters", "gradients", "optimizer"))
    text = (
        f"rank {worst.rank} would hold {in_gib(worst.peak)} at a time ({worst.moment}): "
        f"{in_gib(states)} of parameters, gradients and optimizer, {in_gib(worst.activations)} of "
        f"activations, and more; but {room.why}: "
    )
    offers = [
        f"{' '.join(f'{key}={as_yaml(value)}' for key, value in offer.changes.items())} "
        f"({in_gib(offer.peak)})"
        for offer in nearest(run, worst, room.n_bytes)
    ]
    if not offers:
        return text + "no setting that saves memory is enough; use a layout of more processes"
    return text + "use " + ", or ".join(offers)


@dataclass(frozen=True)
class Offer:
    """Changes with which a run fits, and its peak then."""

    changes: Changes
    peak: int


def nearest(run: RunConfig, worst: Account, n_bytes: int, at_most: int = 3) -> list[Offer]:
    """Settings of the same layout and batch with which a run fits: single ones, cheapest first; if
    there is none, several together, and at last a smaller batch."""

    def peak(changes: Changes) -> int | None:
        """None where the run could not be, or its stages would change places as the largest."""
        other = changed(run, changes)
        if other is None:
            return None
        decisions = decide_run(other)
        found = foretell(other, [worst.rank], decisions)[0].peak
        if found > n_bytes or run.layout.pp == 1:
            return found
        ranks = [*largest_ranks(other, decisions)]
        return max(account.peak for account in foretell(other, ranks, decisions))

    parameters = worst.by_kind.get("parameters", 0)
    if run.layout.dp_mode != "fsdp" and parameters / run.layout.dp > n_bytes:
        return []  # no setting makes them smaller than fsdp would

    found: list[Offer] = []
    saves: list[Changes] = []
    for change in _cheapest_first(run):
        if any(offer.changes.keys() == change.keys() for offer in found):
            continue  # a milder value of the same will do
        size = peak(change)
        if size is not None and size <= n_bytes:
            found.append(Offer(change, size))
            if len(found) == at_most:
                return found
        elif size is not None and size < worst.peak:
            saves.append(change)
    if found:
        return found
    together: Changes = {}
    for change in saves:
        together |= change
        size = peak(together)
        if size is not None and size <= n_bytes:
            return [Offer(together, size)]
    for batch in _smaller_batches(run):
        size = peak(together | batch)
        if size is not None and size <= n_bytes:
            return [Offer(together | batch, size)]
    return []


def _cheapest_first(run: RunConfig) -> Iterator[Changes]:
    """What saves memory, by what it costs in time; of one kind the mildest first."""
    layout, train = run.layout, run.train
    if train.loss_tokens == 0 or train.loss_tokens > 256:
        yield {"train.loss_tokens": 256}
    free, slower = spec_of(layout).savings(layout)
    yield from free
    if layout.dp > 1 and layout.dp_mode == "replicate":
        yield {"layout.dp_mode": "zero1"}
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
    """The run with other values; None if no rule allows it."""
    other = with_changes(run, changes)
    return None if other is None or broken_rules(other) else other


def at_most(run: RunConfig) -> int:
    """More bytes than any rank of the run can hold at a time: as if nothing were cut over the grid,
    with several times as many activations as any block keeps."""
    model, layout, train = run.model, run.layout, run.train
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build_model(model).parameters())
    size = 8 if train.dtype == "float64" else 4
    sequences = train.global_batch // (layout.dp * layout.micro_batches)
    under_way = layout.micro_batches if layout.pp > 1 else 1
    s, source = run.seq_len, run.source_len
    wide = 40 * model.hidden_size + 20 * model.n_heads * model.head_width + 12 * model.ffn_size
    scores = 16 * model.n_heads * (s * s + s * source + source * source)
    stacks = 2 if model.two_stacks else 1
    a_layer = sequences * (wide * (s + source) + scores) * stacks
    logits = 12 * sequences * s * model.vocab_size
    # Integers of dropout's masks take 8 bytes each, many a place.
    masks = 16 * 8 * sequences * ((s + source) * max(model.hidden_size, model.ffn_size) + scores)
    activations = (a_layer * (model.n_layers + 1) * under_way + logits) * size
    return 10 * parameters * size + activations + masks


def in_gib(n_bytes: float) -> str:
    """`1.5 GiB`, or MiB if that reads better."""
    if n_bytes < GIB / 10:
        return f"{n_bytes / 2**20:.3g} MiB"
    return f"{n_bytes / GIB:.3g} GiB"
