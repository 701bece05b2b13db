"""Fake tensors, which have shapes but no memory, and a watch on what is read back from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from gridformer.record.device import NAME
from gridformer.record.events import Read
from gridformer.record.fast_fake import fast_fakes
from gridformer.record.group import Log
from gridformer.record.kernels import LaunchedWork, launched_work
from gridformer.record.no_compiler import without_compiler
from gridformer.record.tracker import MemoryTracker

_COPY = torch.ops.aten.copy_
_DEVICE = torch.ops.prim.device.default
_COPIES = {torch.ops.aten._to_copy, _COPY}
_NUMBERS = {torch.ops.aten._local_scalar_dense, torch.ops.aten.item}
_UNKNOWN = LaunchedWork("", "memory", (), "", 0, 0)


class Watch(TorchDispatchMode):
    """Notes kernels, and copies to the host for which the host waits."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log
        self.storages: MemoryTracker | None = None  # keeps the log of memory
        self.device = log.device.type
        self.fakes = fast_fakes()
        self._works: dict[int, LaunchedWork | None] = {}  # by the ids of recipes, which stay
        self._others: dict[Any, LaunchedWork | None] = {}  # by the keys of other operations
        # By the id of an operation: whether it copies, whether it reads a number, and itself.
        self._about: dict[int, tuple[bool, bool, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping takes a sixth of the time

    def read(self, copies: bool = False) -> None:
        """Notes that the host reads something from the device."""
        read = Read(self.log.places.here(), copies)
        self.log.trace.reads.append(read)
        if self.log.kernels:
            self.log.trace.events.append(read)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:  # asked for more than anything else
            return args[0].fake_device
        about = self._about.get(id(func))
        if about is None:
            op = func.overloadpacket
            kind = op in _COPIES, op in _NUMBERS
            about = self._about[id(func)] = *kind, func
        if about[1]:
            if args[0].device.type == NAME:
                self.read()
            return 1.0 if args[0].is_floating_point() else 1
        out = self._launched(func, args, kwargs or {}) if self.log.kernels else NotImplemented
        if out is NotImplemented:
            out = self.fakes.remembered(func, args, kwargs or {})
        if out is NotImplemented:
            out = func(*args, **(kwargs or {}))
        if about[0]:
            self._copied(func.overloadpacket, out, args, kwargs or {})
        if self.storages is not None:
            self.storages.see(args, kwargs or {}, out)
        return out

    def _copied(self, op: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes a copy to the host for which the host waits."""
        if out.device.type == "cpu" and not _goes_on(op, args, kwargs):
            source = args[1] if op is _COPY else args[0]
            if source.device.type == NAME:
                self.read(copies=True)

    def _launched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator and records what it launches; NotImplemented for messages."""
        if func.namespace == "c10d":
            return NotImplemented
        key, tensors, recipe = self.fakes.known(func, args, kwargs)
        out = self.fakes.made(recipe, tensors)
        if out is not NotImplemented:
            work = self._works.get(id(recipe), _UNKNOWN)
            if work is _UNKNOWN:
                work = self._works[id(recipe)] = launched_work(func, args, kwargs, out, self.device)
        else:
            out = func(*args, **kwargs)
            work = self._others.get(key, _UNKNOWN) if key is not None else _UNKNOWN
            if work is _UNKNOWN:
                work = launched_work(func, args, kwargs, out, self.device)
                if key is not None:
                    self._others[key] = work
        if work is not None:
            self.log.launch(work)
        return out


def _goes_on(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether the host does not wait for a copy."""
    return bool((op is _COPY and len(args) > 2 and args[2]) or kwargs.get("non_blocking"))


@contextmanager
def watched_fakes(log: Log) -> Iterator[Watch]:
    """Makes all new tensors fake, and records in a rank's log what is read back from the device.

    A number that is read from a tensor is 1, with which a step takes its ordinary path.
    """
    with without_compiler(), fast_fakes(), Watch(log) as watch:
        yield watch
