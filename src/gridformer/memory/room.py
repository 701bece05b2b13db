"""The memory that each process of a run may take: a GPU's, or a share of what is free here.

An estimate fits if it leaves a margin: `train`, `memory`, `predict` and `plan` share it.

Nothing here loads torch unless it may find GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.mesh.gpus import gpus_here, n_visible_gpus, processes_on_a_gpu
from gridformer.mesh.launch_env import rank_env
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
    """The budget of one process.

    Attributes:
        n_bytes: The bytes that the tensors of one process may take by estimate.
        why: Where that number comes from, as part of a sentence.
    """

    n_bytes: int
    why: str


def room_of_budget(gib: float, name: str) -> Room:
    """Returns the room that a budget of a process leaves.

    Args:
        gib: The budget in GiB.
        name: What it is called where it was set, such as `train.memory_gib=16`.
    """
    n_bytes = round(gib * GIB * USABLE)
    return Room(n_bytes, f"{name} leaves {format_bytes(n_bytes)} with 5% to spare")


def room_on(run: RunConfig, cluster: Cluster) -> float:
    """Returns the largest estimate that fits on a device of a cluster, in GiB.

    Args:
        run: The run, whose `train.memory_gib` may lower it.
        cluster: The cluster.
    """
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
