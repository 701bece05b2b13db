"""Process groups: queries about their backend, and the one function that creates them.

All processes must create groups in the same order, even groups that they are not in.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import nullcontext
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gridformer.utils.torch_private import named_group, one_gloo_device, world_timeout

# The groups that `objects_group` has created, by default group.
_objects: MutableMapping[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
# How often groups were created, by default group.
_n_made: MutableMapping[ProcessGroup, int] = WeakKeyDictionary()
# Are told the lines and the purpose of groups before `make_groups` creates them; a trace is one.
listeners: list[Callable[[Sequence[Sequence[int]], str], object]] = []


def over_nccl(group: ProcessGroup | None) -> bool:
    """Returns whether a group (None means the default group) uses NCCL.

    NCCL has fast collectives of its own and executes the messages of a group one after the other.
    With gloo, an all-gather or a reduce-scatter is faster as an exchange of blocks, and messages do
    not wait for each other. `gridformer.comm` calls this function wherever that makes a difference.
    """
    return bool(dist.get_backend(group).startswith("nccl"))  # also where a trace imitates it


def through_host(x: Tensor, group: ProcessGroup | None) -> bool:
    """Returns whether a point-to-point message of tensor x must be in host memory.

    With gloo it must: gloo copies the tensors of collectives from and to a GPU by itself, but not
    those of send and receive.
    """
    return x.is_cuda and dist.get_backend(group) == "gloo"


def objects_group() -> ProcessGroup | None:
    """Returns a group of all processes for objects and for tensors in host memory.

    NCCL sends only what is on a GPU. Objects would be copied there and back, with the host waiting
    for the GPU each time, and a thousand ranks' objects would take memory on the GPU of one. Over
    NCCL this is therefore a gloo group; the first call creates it, which all processes must make.
    None is the default group, or means that there is none.
    """
    if not dist.is_initialized() or not over_nccl(None):
        return None
    world = dist.group.WORLD
    assert world is not None
    if world not in _objects:
        _objects[world] = dist.new_group(
            backend="gloo", timeout=world_timeout(), group_desc="objects"
        )
    return _objects[world]


def make_groups(lines: Sequence[Sequence[int]], purpose: str) -> ProcessGroup | None:
    """Creates a process group for each line of ranks and returns the one of this process.

    All processes must call this with the same lines. The groups have the timeout of the default
    group.

    Lines are disjoint lists of global ranks in ascending order, because torch sorts the members of
    a group. A process makes at most its own group: with thousands of ranks there are thousands.

    Returns:
        The group, or None if no line contains this process.
    """
    for listener in listeners:
        listener(lines, purpose)
    world = dist.group.WORLD
    assert world is not None
    # How often groups were created is the same on all ranks.
    here, number = dist.get_rank(), _n_made.get(world, 0) + 1
    _n_made[world] = number
    mine = next((line for line in lines if here in line), None)
    assert mine is None or [*mine] == sorted(mine), "torch would sort them"
    name = named_group(f"{purpose} {number} {mine[0]}") if mine else nullcontext()
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        # NCCL is connected already by init_process_groups; all groups are split off it at once.
        with name:
            split: ProcessGroup | None = dist.split_group(
                split_ranks=[[*line] for line in lines], timeout=world_timeout(), group_desc=purpose
            )
        return split
    if mine is None:
        return None
    with one_gloo_device(), name:
        group: ProcessGroup = dist.new_group(
            [*mine], timeout=world_timeout(), group_desc=purpose, use_local_synchronization=True
        )
    return group
