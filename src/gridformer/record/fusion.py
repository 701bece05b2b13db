"""Joins the kernels of compiled modules as torch.compile does.

A record runs uncompiled code. Memory-bound kernels of a compiled module that follow each other
between products, attention, operators of gridformer and messages become one here. It reads each
tensor made outside of it once, and writes only what is read later: tensors that still exist when
another kernel is launched. Casts to wider types are repeated instead of written. Sums over tokens,
such as gradients of a norm's parameters, need a kernel of their own, because the others work on one
token at a time.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gridformer.models import Model
from gridformer.models.blocks import Linear, MergedLinear
from gridformer.record.device import NAME
from gridformer.record.events import Kernel
from gridformer.record.kernels import FILLS, LOOKUPS, SCATTERS, changed, extent, tensors_in
from gridformer.train.compile import compiled_parts, is_left_out

_PARTLY_READ = {*LOOKUPS, *SCATTERS, "nll_loss_forward"}  # they read little of the first argument

_Storage = weakref.ref[torch.UntypedStorage]


class _Read(NamedTuple):
    """A part of a storage: its number, an offset, and how many bytes are read."""

    storage: int
    offset: int
    n_bytes: int


class Fusion:
    """Joins kernels while they are recorded.

    Args:
        model: The model that is recorded.
        events: Where kernels are recorded. The first of those that are joined holds their place.
    """

    def __init__(self, model: Model, events: list[Any]) -> None:
        self._regions, self._events = _regions(model), events
        self._at: tuple[str, bool] | None = None  # the module and direction of the open kernel
        self._first = self._n = 0  # where it is among the events, and how many it joins
        self._read: dict[tuple[int, int], int] = {}  # bytes, by storage and offset
        self._written: dict[int, tuple[_Storage, int]] = {}  # with its bytes
        self._casts: dict[int, _Read] = {}  # what is read for a cast to a wider type
        # The numbers of storages, by their ids, which others get when they have died.
        self._numbers: dict[int, tuple[_Storage, int]] = {}
        self._counter = count()
        self._known: dict[Kernel, Kernel] = {}  # one object for equal kernels

    def takes(self, kernel: Kernel, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        """Adds a kernel to those that are joined, and returns whether they hold a place for it.

        If the result is false, the kernel is to be recorded as it is.
        """
        region = self._regions.get(kernel.place.module)
        if region is None and kernel.op == "cat":  # of gradients of a product's parts
            region = self._regions.get(kernel.place.module.rpartition(".")[0])
        if region is None or kernel.kind != "memory" or func.namespace != "aten":
            self.end()
            return False
        if self._at != (at := (region, kernel.place.backward)):
            self.end()
            self._at = at
        given = [x for x in tensors_in((args, [*kwargs.values()])) if x.device.type == NAME]
        results = [x for x in tensors_in((out,)) if x.device.type == NAME]
        name = kernel.op
        if name == "sum" and given[0].dim() > 1 and results[0].shape[-1:] == given[0].shape[-1:]:
            return False  # over tokens
        if name == "native_layer_norm_backward":  # sums, too
            n_bytes = sum(self._source(x).n_bytes for x in given[:2])
            self._events.append(self._one(kernel._replace(bytes=n_bytes)))
        for x in given[name in FILLS or name in _PARTLY_READ :]:
            key, offset, n_bytes = self._source(x)
            if key not in self._written:
                self._read[key, offset] = max(self._read.get((key, offset), 0), n_bytes)
        if name == "_to_copy" and results[0].itemsize > given[0].itemsize:
            self._casts[self._number(results.pop())] = self._source(given[0])
        for x in (*results, *changed(func, args)):
            key = self._number(x)
            self._casts.pop(key, None)
            ref, before = self._written.get(key, (weakref.ref(x.untyped_storage()), 0))
            self._written[key] = ref, max(before, extent(x))
        if not self._n:
            self._first = len(self._events)
            self._events.append(kernel)
        self._n += 1
        return True

    def end(self) -> None:
        """Ends the kernel that is open, if one is."""
        if self._n:
            first: Kernel = self._events[self._first]
            written = sum(n_bytes for ref, n_bytes in self._written.values() if ref() is not None)
            joined = first._replace(op="joined", bytes=sum(self._read.values()) + written)
            if self._n > 1:
                self._events[self._first] = self._one(joined)
        self._at, self._n = None, 0
        self._read, self._written = {}, {}

    def _one(self, kernel: Kernel) -> Kernel:
        return self._known.setdefault(kernel, kernel)

    def _source(self, x: Tensor) -> _Read:
        """Returns what has to be read for a tensor: itself, or what it was cast from."""
        key = self._number(x)
        return self._casts.get(key) or _Read(key, int(x.storage_offset()), extent(x))

    def _number(self, x: Tensor) -> int:
        """Returns the number of a tensor's storage."""
        storage = x.untyped_storage()
        ref, number = self._numbers.get(id(storage), (None, 0))
        if ref is None or ref() is not storage:
            number = next(self._counter)
            self._numbers[id(storage)] = weakref.ref(storage), number
        return number


def _regions(model: Model) -> dict[str, str]:
    """Returns the compiled module around each module whose kernels are joined, by their names."""
    regions: dict[str, str] = {}
    parts = compiled_parts(model)
    for name, module in model.named_modules():  # owners come first
        if is_left_out(module) or isinstance(module, Linear | MergedLinear):
            continue
        owner = name.rpartition(".")[0]
        if module in parts:
            regions[name] = name
        elif owner in regions:
            regions[name] = regions[owner]
    return regions
