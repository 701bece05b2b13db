"""The private names of torch that packages need which may not import `comm`.

All others are in `comm`, `record` and `placeholder_module`; docs/reference/internals.md lists them.
Commands that need no tensors import this file late, as torch takes a second to import.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import _sleep as keep_gpu_busy
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _abort_process_group as abort_groups
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

__all__ = ["DispatchMode", "abort_groups", "keep_gpu_busy", "without_modes"]


def in_backward() -> bool:
    """Returns whether the caller runs inside a backward pass, recomputation included."""
    return torch._C._current_graph_task_id() != -1


def base_of(x: Tensor) -> Tensor:
    """Returns the tensor of which x is a view, or x itself."""
    return x if x._base is None else x._base


def has_hooks(x: Tensor) -> bool:
    """Returns whether functions were registered that are called with the gradient of x."""
    return bool(x._backward_hooks)


def is_same_view(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors are the same view of the same memory, which fake ones have not.

    `Tensor.is_set_to` would ask the device.
    """
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    places = ((x.storage_offset(), x.shape, x.stride()) for x in (a, b))
    return same and next(places) == next(places)


def named_group(name: str) -> AbstractContextManager[None]:
    """Names the group that is created inside the context; its members meet under this name.

    Torch's own names depend on how many groups a process is in, which may differ between members.
    """
    return _replaced("_process_group_name", lambda *_, **__: name)


def one_gloo_device() -> AbstractContextManager[None]:
    """Lets the groups that are created inside the context use the default group's gloo device.

    A device is a thread that wakes every 10 ms for about 10 us; with one for each group, 16
    processes with 30 groups would keep half a core busy. Torch has no option for it.
    """
    world = dist.group.WORLD
    gloo: Any = getattr(dist, "ProcessGroupGloo", None)
    if world is None or gloo is None or dist.get_backend() != "gloo":
        return nullcontext()
    backend = world._get_backend(torch.device("cpu"))
    devices = getattr(getattr(backend, "options", None), "_devices", None)
    if not isinstance(backend, gloo) or not devices:  # as with TORCH_DISTRIBUTED_DEBUG=DETAIL
        return nullcontext()

    class OnOneDevice(gloo):
        # torch 2.14 also says whether the group can be reconfigured, which no group here is.
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
            options = gloo._Options()
            options._devices, options._timeout = devices, timeout
            super().__init__(store, rank, size, options)

    return _replaced("ProcessGroupGloo", OnOneDevice)


@contextmanager
def _replaced(name: str, value: Any) -> Iterator[None]:
    """Replaces what torch finds under a name when it creates groups."""
    before = getattr(distributed_c10d, name)
    setattr(distributed_c10d, name, value)
    try:
        yield
    finally:
        setattr(distributed_c10d, name, before)


def world_timeout() -> timedelta | None:
    """Returns the timeout of the default group, which torch does not pass on to other groups.

    It is None if the backend has none, such as torch's fake backend, where torch's default applies.
    """
    world = dist.group.WORLD
    assert world is not None
    options = world._get_backend(world._device_types[0]).options
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout
