"""The memory that each process of a run may take, and bounds of what it takes, by its config alone.

It is a GPU's memory, or a share of what is free here. An estimate fits if it leaves a margin:
`train`, `memory`, `predict` and `plan` share it. Nothing here loads torch unless it may find GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.mesh.gpus import gpus_here, n_visible_gpus, processes_on_a_gpu
from gridformer.mesh.launch_env import rank_env
from gridformer.parallel.auto.products import moment_bytes, parameter_bytes, state_bytes
from gridformer.parallel.registry import spec_of
from gridformer.utils.process import free_memory
from gridformer.utils.units import GIB, format_bytes

# Called with what was found, which may be empty, and with what begins now.
Tell = Callable[[str, str], None]

OWN_CPU = GIB * 2 // 5  # bytes that a process holds before any tensor
OWN_CUDA = GIB  # bytes of the driver's context and of NCCL's buffers
# The part of a budget that an estimate may reach. The rest is for what the estimate does not cover:
# an allocator rounds and caches, and the kernels of GPUs hold up to 2% more than those of CPUs.
USABLE = 0.95


def silent(found: str, doing: str) -> None:
    """A `Tell` that ignores everything, for callers without a terminal."""


@dataclass(frozen=True)
class Room:
    """The bytes that the tensors of one process may take by estimate, and why, in a clause."""

    n_bytes: int
    why: str


def room_of_budget(gib: float, name: str) -> Room:
    """Returns the room that a budget leaves, set by a name such as `train.memory_gib=16`."""
    n_bytes = round(gib * GIB * USABLE)
    return Room(n_bytes, f"{name} leaves {format_bytes(n_bytes)} with 5% to spare")


def room_on(run: RunConfig, cluster: Cluster) -> float:
    """Returns the largest estimate that fits on a device of a cluster, in GiB."""
    own = run.train.memory_gib
    return USABLE * (min(own, cluster.limit_gib) if own else cluster.limit_gib)


def room_of(run: RunConfig) -> Room | None:
    """Returns the budget of each process on this machine, or None if it is not known."""
    if run.train.memory_gib:
        gib = run.train.memory_gib
        return room_of_budget(gib, f"train.memory_gib={gib:g}")
    place, gpus = rank_env(), gpus_of(run)
    n_here = place.local_size if place else run.layout.n_processes
    if gpus:
        import torch

        least = min(torch.cuda.get_device_properties(i).total_memory for i in gpus)
        n_on_it = processes_on_a_gpu(place, run.layout.n_processes)
        usable = round((least / n_on_it - OWN_CUDA) * USABLE)
        of = f"a GPU's {format_bytes(least)}"
        if n_on_it > 1:
            of += f", which {n_on_it} processes share,"
        return Room(usable, f"{format_bytes(usable)} of {of} are available to tensors")
    free = free_memory()
    if free is None:
        return None
    share = round(max(0, free // n_here - OWN_CPU) * USABLE)
    own = f"each takes {format_bytes(OWN_CPU)} for itself and has 5% to spare"
    return Room(
        share,
        f"{format_bytes(share)} are left for each of {n_here} processes, with "
        f"{format_bytes(free)} free here, of which {own}",
    )


def gpus_of(run: RunConfig) -> list[int]:
    """Returns the GPUs that a run started now would use on this machine."""
    return gpus_here(rank_env(), run.layout.n_processes) if run.train.device != "cpu" else []


def on_gpu(run: RunConfig) -> bool:
    """Returns whether the run's tensors will be on GPUs, as far as this machine can tell."""
    if run.train.device == "auto":
        return n_visible_gpus() > 0
    return run.train.device == "cuda"


# --------------------------------------------------------------------------- bounds


def beyond_saving(run: RunConfig, room: Room) -> list[str]:
    """Returns why a run cannot fit with any settings that save memory, if its sizes alone show it.

    This is one problem if the shards of matrices and of their moments alone exceed the budget, with
    FSDP and without gradients; otherwise `gridformer.memory.budget.fit_problems` looks closer.
    """
    layout, elements = run.layout, run.model.matrix_elements
    devices = layout.pp * math.prod(spec_of(layout).grid(layout))
    moments = 0.0  # which a GPU may leave to its host
    if run.train.device == "cpu":
        moments = moment_bytes(run) / parameter_bytes(run)
    least = elements / devices / layout.dp * (1 + moments) * parameter_bytes(run)
    if least <= room.n_bytes:
        return []
    each = state_bytes(run, layout.shards)
    alone = format_bytes(round(elements / devices * each))
    return [
        f"a rank would hold {alone} of parameters, gradients and optimizer alone; but {room.why}: "
        f"{enough_devices(elements * each, room)}"
    ]


def enough_devices(n_bytes: float, room: Room) -> str:
    """Returns the remedy for a run whose states take so many bytes on all devices of a replica."""
    devices = math.ceil(n_bytes / max(1, room.n_bytes))
    return (
        f"no setting that saves memory is enough; use a layout of {devices:,} or more devices of "
        "this size"
    )


def upper_bound(run: RunConfig) -> int:
    """Returns an upper bound of the bytes that any rank of the run holds at a time.

    It assumes that nothing is sharded over the grid, and several times as many activations as any
    block keeps.
    """
    from gridformer.models import count_parameters

    model, layout, train = run.model, run.layout, run.train
    parameters = count_parameters(model)
    size = 8 if train.dtype == "float64" else 4
    sequences = train.global_batch // (layout.dp * layout.micro_batches)
    under_way = layout.micro_batches if layout.pp > 1 else 1
    s, source = run.seq_len, run.source_len
    wide = 40 * model.hidden_size + 20 * model.n_heads * model.head_width
    inner = model.experts_per_token * model.expert_size + model.shared_size
    wide += (12 + 12 * model.gated) * max(model.ffn_size, inner)
    wide += 12 * (model.experts_per_token * model.hidden_size + model.n_experts)
    scores = 16 * model.n_heads * (s * s + s * source + source * source)
    stacks = 2 if model.two_stacks else 1
    a_layer = sequences * (wide * (s + source) + scores) * stacks
    logits = 12 * sequences * s * model.vocab_size
    # The integers from which dropout masks are made: 8 bytes each, many per element.
    masks = 16 * 8 * sequences * ((s + source) * max(model.hidden_size, model.ffn_size) + scores)
    activations = (a_layer * (model.n_layers + 1) * under_way + logits) * size
    states = 10 + 3 * train.saves_meanwhile
    return states * parameters * size + activations + masks
