"""The memory that each process of a run may take: that of a GPU, or a part of what is free here.

Nothing here loads torch unless it may find GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gridformer.config import RunConfig
from gridformer.mesh.gpus import gpus_here, n_visible_gpus
from gridformer.mesh.launch_env import joined
from gridformer.utils.hardware import free_memory
from gridformer.utils.units import GIB, format_bytes

# Called with what was found, which may be empty, and with what begins now.
Tell = Callable[[str, str], None]

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
    place, gpus = joined(), gpus_of(run)
    n_here = place.local_size if place else run.layout.n_processes
    if gpus:
        import torch

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


def gpus_of(run: RunConfig) -> list[int]:
    """Returns the GPUs that a run started now would use on this machine."""
    return gpus_here(joined(), run.layout.n_processes) if run.train.device != "cpu" else []


def on_gpu(run: RunConfig) -> bool:
    """Returns whether the run's tensors will be on GPUs, as far as this machine can tell."""
    if run.train.device == "auto":
        return n_visible_gpus() > 0
    return run.train.device == "cuda"
