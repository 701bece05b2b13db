"""Process groups: queries about their backend, and the one function that creates them.

All processes must create groups in the same order, even groups that they are not in.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


# The groups that `objects_group` has created, by default group.
_objects: MutableMapping[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
# How often groups were created, by default group.
_n_made: MutableMapping[ProcessGroup, int] = WeakKeyDictionary()


def over_nccl(group: ProcessGroup | None) -> bool:
    """Returns whether a group (None means the default group) uses NCCL.

    NCCL has fast collectives of its own and executes the messages of a group one after the other.
    With gloo, an all-gather or a reduce-scatter is faster as an exchange of blocks, and messages do
    not wait for each other. `gridformer.comm` calls this function wherever that makes a difference.
    """
    import torch.distributed as dist  # a slow import that commands without processes do not need

    return bool(dist.get_backend(group) == "nccl")


def through_host(x: Tensor, group: ProcessGroup | None) -> bool:
    """Returns whether a point-to-point message of tensor x must be in host memory.

    With gloo it must: gloo copies the tensors of collectives from and to a GPU by itself, but not
    those of send and receive.
    """
    import torch.distributed as dist

    return x.is_cuda and dist.get_backend(group) == "gloo"


def objects_group() -> ProcessGroup | None:
    """Returns a group of all processes for objects and for tensors in host memory.

    NCCL sends only what is on a GPU. Objects would be copied there and back, with the host waiting
    for the GPU each time, and a thousand ranks' objects would take memory on the GPU of one. Over
    NCCL this is therefore a gloo group; the first call creates it, which all processes must make.

    Returns:
        The group. None is the default group, or means that there is none.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or not over_nccl(None):
        return None
    world = dist.group.WORLD
    assert world is not None
    if world not in _objects:
        _objects[world] = dist.new_group(backend="gloo", timeout=_timeout(), group_desc="objects")
    return _objects[world]


def make_groups(lines: Sequence[Sequence[int]], purpose: str) -> ProcessGroup | None:
    """Creates a process group for each line of ranks and returns the one of this process.

    All processes must call this with the same lines. The groups have the timeout of the default
    group.

    Args:
        lines: Disjoint lists of global ranks, each in ascending order because torch sorts the
            members of a group.
        purpose: A name for the groups in torch's reports.

    Returns:
        The group, or None if no line contains this process.
    """
    import torch.distributed as dist

    here = dist.get_rank()  # checks its own line only: there may be thousands
    assert all([*line] == sorted(line) for line in lines if here in line), "torch would sort them"
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        # NCCL is connected already by init_process_groups; all groups are split off it at once.
        number, mine = _next_number(), next((line for line in lines if here in line), None)
        with _named(f"{purpose} {number} {mine[0]}") if mine else nullcontext():
            split: ProcessGroup | None = dist.split_group(
                split_ranks=[[*line] for line in lines], timeout=_timeout(), group_desc=purpose
            )
        return split
    return create_each(lines, purpose)


def create_each(lines: Sequence[Sequence[int]], purpose: str) -> ProcessGroup | None:
    """Creates the groups of `make_groups`, each by its own members. A trace replaces this.

    A process makes at most one group, however many lines there are: with thousands of ranks there
    are thousands of lines.

    Args:
        lines: The global ranks of each group; a rank is in one of them at most.
        purpose: A name for the groups in torch's reports.

    Returns:
        The group of this process, or None if it is in none.
    """
    import torch.distributed as dist

    here, number = dist.get_rank(), _next_number()
    line = next((line for line in lines if here in line), None)
    if line is None:
        return None
    with _one_gloo_device(), _named(f"{purpose} {number} {line[0]}"):
        group: ProcessGroup = dist.new_group(
            [*line], timeout=_timeout(), group_desc=purpose, use_local_synchronization=True
        )
    return group


def _next_number() -> int:
    """Returns how often groups were created, which is the same on all ranks."""
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    number = _n_made[world] = _n_made.get(world, 0) + 1
    return number


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Names the group that is created inside the context; its members meet under this name.

    Torch numbers groups, which is the same on all ranks only if all take part in creating each of
    them. For groups that only their members create, torch takes a hash that depends on the number
    of groups that this process is in, which may differ between the members.
    """
    from torch.distributed import distributed_c10d

    before = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *_, **__: name  # type: ignore[assignment]
    try:
        yield
    finally:
        distributed_c10d._process_group_name = before


@contextmanager
def _one_gloo_device() -> Iterator[None]:
    """Lets the groups that are created inside the context use the default group's gloo device.

    A device is a thread that handles sockets and wakes every 10 ms, which takes it about 10 us.
    Torch gives each group a device of its own, so 16 processes with 30 groups would keep half a
    core busy doing nothing. Torch has no option for it: it creates `ProcessGroupGloo` by name.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    world = dist.group.WORLD
    gloo: Any = getattr(dist, "ProcessGroupGloo", None)
    if world is None or gloo is None or dist.get_backend() != "gloo":
        yield
        return
    backend = world._get_backend(torch.device("cpu"))
    devices = getattr(getattr(backend, "options", None), "_devices", None)
    if not isinstance(backend, gloo) or not devices:  # as with TORCH_DISTRIBUTED_DEBUG=DETAIL
        yield
        return

    class OnOneDevice(gloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._devices, options._timeout = devices, timeout
            super().__init__(store, rank, size, options)

    before = distributed_c10d.ProcessGroupGloo
    distributed_c10d.ProcessGroupGloo = OnOneDevice  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = before  # type: ignore[misc]


def _timeout() -> timedelta | None:
    """Returns the timeout of the default group, which torch does not pass on to other groups.

    It is None if the backend has no timeout, such as torch's fake backend; torch's own default, 10
    or 30 minutes, then applies.
    """
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    options = world._get_backend(world._device_types[0]).options
    found: timedelta | None = getattr(options, "_timeout", None)
    return found
