"""Process groups: what serves them, and the one place where they are made.

Torch wants every process to make every group, in one order, also those that it is not in.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


def over_nccl(group: ProcessGroup | None) -> bool:
    """Whether a group's messages go over NCCL; of None, those of the default group.

    NCCL has fast collectives of its own, and carries out the messages of a group one after the
    other. Over gloo an all-gather or a reduce-scatter is quicker as an exchange of blocks, and
    messages do not wait for each other. What differs in `gridformer.comm` asks here.
    """
    import torch.distributed as dist  # takes time, of commands that start nothing

    return bool(dist.get_backend(group) == "nccl")


def through_host(x: Tensor, group: ProcessGroup | None) -> bool:
    """Whether a message to one rank must lie in the host's memory: gloo copies what collectives are
    given from and to a GPU by itself, but neither what is sent nor what is received."""
    import torch.distributed as dist

    return x.is_cuda and dist.get_backend(group) == "gloo"


def make_groups(lines: Sequence[Sequence[int]], purpose: str) -> ProcessGroup | None:
    """Make a group of each line of ranks, and return the one that this process is in, if any.

    All processes call this with the same lines, which share no rank. Groups have the default
    group's timeout.

    Args:
        lines: ranks of the world, rising within a line, as torch numbers the members of a group.
        purpose: a name for torch's reports.
    """
    import torch.distributed as dist

    assert all([*line] == sorted(line) for line in lines), "torch would sort them"
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        # NCCL is connected already (see init_world), and all lines are split off it at once.
        split: ProcessGroup | None = dist.split_group(
            split_ranks=[[*line] for line in lines], timeout=_timeout(), group_desc=purpose
        )
        return split
    mine = None
    for line in lines:
        group = dist.new_group([*line], timeout=_timeout(), group_desc=purpose)
        if dist.get_rank() in line:
            mine = group
    return mine


def _timeout() -> timedelta | None:
    """The default group's. Torch gives every other group ten or thirty minutes unless it is told;
    None leaves it at that, where the backend has no timeout (torch's fake one)."""
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    options = world._get_backend(world._device_types[0]).options
    found: timedelta | None = getattr(options, "_timeout", None)
    return found
