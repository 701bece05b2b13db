"""The most memory that the tensors of a process have taken on its GPU."""

from __future__ import annotations

import torch

from gridformer import comm
from gridformer.mesh import Axis
from gridformer.train.results import Copied


def allocated(device: torch.device) -> int | None:
    """Returns the most bytes that tensors have taken on a GPU; None on a CPU, where none counts."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def start_largest(device: torch.device, world: Axis) -> Copied | None:
    """Launches the search for the largest peak of all processes, for which no host waits.

    All ranks call it together, after they have launched a step. The host knows what the step takes
    as soon as it is launched.

    Args:
        device: The device of this process.
        world: The axis of all processes.

    Returns:
        The bytes, on their way to the host; None on CPUs.
    """
    peak = allocated(device)
    if peak is None:
        return None
    mine = torch.full((1,), peak, dtype=torch.int64, device=device)  # a copy would wait
    return Copied(comm.all_reduce(mine, world, "max", label="metrics"))
