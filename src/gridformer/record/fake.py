"""Fake tensors, which have shapes but no memory, made fast; and what operators on them launch.

torch's own `FakeTensorMode` takes some 300 microseconds an operation, even if it remembers the
result. A step runs the same few hundred operations on the same shapes again and again, so this mode
keeps, for each operation and the shapes of its arguments, how its results are made: an argument
itself, a view of an argument, or a new tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._python_dispatch import TorchDispatchMode

from gridformer.models.kernels import grouped
from gridformer.record.device import NAME
from gridformer.record.events import Kernel, Read
from gridformer.record.group import Log
from gridformer.record.kernels import launched_work
from gridformer.record.no_compiler import without_compiler
from gridformer.record.routing import stated
from gridformer.record.tracker import MemoryTracker

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")


def _ids(*packets: Any) -> set[int]:
    """Returns the ids of operators. These exist once, and torch computes their hashes in Python."""
    return {id(getattr(packet, name)) for packet in packets for name in packet.overloads()}


# Operators that return a view of a tensor. Calls that take another part of it each time seldom
# repeat.
_VIEWS = {
    *(_aten.slice.Tensor, _aten.select.int, _aten.view.default, _aten.as_strided.default),
    *(_aten.detach.default, _aten.t.default, _aten.transpose.int, _aten.permute.default),
    *(_aten.unsqueeze.default, _aten.expand.default),
}
# An argument of these is the offset of their result in a storage.
_WITH_OFFSET = _ids(
    *(_aten.as_strided, _aten.as_strided_, _aten.as_strided_copy, _aten.as_strided_scatter),
    _aten.set_,
)
_COPIES = _ids(torch.ops.aten._to_copy, _aten.copy_)
_SIZES = grouped.sizes_on_host.default
_READS = _ids(torch.ops.aten._local_scalar_dense, _aten.item)
# torch's dispatch without the check for its compiler, which is not used here.
_real_dispatch = getattr(
    FakeTensorMode.__torch_dispatch__, "__wrapped__", FakeTensorMode.__torch_dispatch__
)
_UNKNOWN = Kernel("", "memory", (), "", 0, 0)


class _Result(NamedTuple):
    """How a result of an operation is made.

    Attributes:
        argument: The number of the tensor among the arguments of which it is a view; None if it is
            a new tensor.
        offset: How far its storage offset is behind that of the argument. The offset of an argument
            decides nothing else, so equal parts of a tensor are made in the same way.
    """

    argument: int | None
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class Recipe(NamedTuple):
    """How the results of an operation are made.

    Attributes:
        results: Each result: the number of the argument that it is, or how it is made.
        kind: The type of the sequence of results; None if there is only one.
    """

    results: tuple[_Result | int | None, ...]
    kind: type[tuple[Any, ...]] | type[list[Any]] | None


_NEW = Recipe((), None)  # of an operation that was not yet seen


class _UnknownError(Exception):
    """An argument or a result has a property that recipes do not describe."""


@cache
def fast_fakes() -> FastFakeTensorMode:
    """Returns the mode of this process, which remembers what earlier records have run."""
    with without_compiler():
        return FastFakeTensorMode()


class FastFakeTensorMode(FakeTensorMode):
    """A `FakeTensorMode` with the same results, in less time."""

    def __init__(self) -> None:
        # Loaded here, because tensors that a module makes when it is loaded do not belong to a
        # trace.
        import torch._decomp  # noqa: F401

        super().__init__()
        self.cache_enabled = False  # torch's own, which costs as much as it saves below this one
        self._recipes: dict[Any, Recipe | None] = {}
        self._values: dict[Any, Any] = {}  # results of operations without tensors
        # Attributes of a new fake tensor on a device.
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping it takes time in each operation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func is _aten.fill_.Tensor and _is_constant(args[1]) and not _is_constant(args[0]):
            return args[0]  # torch writes a number as a constant, which has no key
        if func is _aten.lift_fresh.default and type(args[0]) is Tensor:
            x = args[0]
            return self._constant(x) if x.numel() == 1 else self._empty(x.shape, x.dtype, x.device)
        kwargs = kwargs or {}
        key, tensors, recipe = self.known(func, args, kwargs)
        if recipe is None:
            if key in self._values:
                return self._values[key]
            return _real_dispatch(self, func, types, args, kwargs)
        if recipe is _NEW and func in _VIEWS:
            recipe = self._view(func, tensors, args, kwargs)
            if recipe is not _NEW:
                self._recipes[key] = recipe
        if recipe is not _NEW:
            return self.made(recipe, tensors)
        if func is _aten.count_nonzero.default:  # for which torch loads torch.distributed.tensor
            out = self._empty((), torch.int64, tensors[0].device)
        else:
            out = _real_dispatch(self, func, types, args, kwargs)
        self._recipes[key] = self._recipe(func, tensors, out)
        if not tensors and isinstance(out, int | torch.dtype):
            self._values[key] = out
        return out

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        """Returns a new tensor; torch's own way to fill one loads a part of its compiler."""
        kwargs = {"dtype": dtype, "device": device}
        return self.__torch_dispatch__(_aten.empty.memory_format, (), ([*shape],), kwargs)

    def _constant(self, number: Tensor) -> FakeTensor:
        """Returns a fake tensor of a known value; torch's own way loads a part of its compiler."""
        with torch._C._DisableTorchDispatch():
            constant = number.clone()
            meta = torch.empty_like(number, device="meta")
            x = FakeTensor(self, meta, number.device, constant=constant)
        self.fake_tensor_converter.add_constant_storage_mapping(x)
        return x

    def known(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Tensor], Recipe | None]:
        """Looks an operation up.

        Returns:
            Its key, None if it has none; the tensors among its arguments; and how its results are
            made, which is None if that cannot be described, and empty if it is not yet known.
        """
        tensors: list[Tensor] = []
        try:
            key: tuple[Any, ...] = id(func), self._key(args, tensors)
            if kwargs:
                key += (*kwargs, self._key([*kwargs.values()], tensors))
            if id(func) in _WITH_OFFSET:
                key += tuple([x.storage_offset() for x in tensors])
            return key, tensors, self._recipes.get(key, _NEW)
        except (_UnknownError, TypeError):  # or an argument that is not hashable
            return None, tensors, None

    def _key(self, args: Sequence[Any], tensors: list[Tensor]) -> tuple[Any, ...]:
        """Returns what a result can depend on, and adds the tensors among arguments to a list."""
        key: list[Any] = []
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                attributes = arg.__dict__
                if attributes["constant"] is not None or attributes["fake_mode"] is not self:
                    raise _UnknownError
                # The device's place among the attributes differs between versions of torch.
                key += arg.shape, arg.stride(), arg.dtype, arg.fake_device
                tensors.append(arg)
            elif kind is list or kind is tuple:
                key.append(self._key(arg, tensors))
            elif isinstance(arg, Tensor):
                raise _UnknownError
            else:
                key += (kind, arg)  # 1, 1.0 and True are equal, but results depend on the type
        return tuple(key)

    # ------------------------------------------------------------------ results

    def _recipe(self, func: Any, tensors: list[Tensor], out: Any) -> Recipe | None:
        """Returns how to make what an operation has returned; None if it cannot be described."""
        if torch.Tag.inplace_view in func.tags or torch.Tag.data_dependent_output in func.tags:
            return None
        # Some operations return a tuple with names, which nobody sees above this mode.
        kind = next((kind for kind in (tuple, list) if isinstance(out, kind)), None)
        outs = out if kind else [out]
        try:
            results = [self._result(x, tensors) for x in outs]
        except _UnknownError:
            return None
        new = [
            x.untyped_storage()._cdata
            for x, result in zip(outs, results)
            if isinstance(result, _Result) and result.argument is None
        ]
        return Recipe(tuple(results), kind) if len(new) == len(set(new)) else None

    def _result(self, x: Any, tensors: list[Tensor]) -> _Result | int | None:
        if x is None:
            return None
        if type(x) is not FakeTensor or x.constant is not None or x.requires_grad:
            raise _UnknownError
        if x.is_conj() or x.is_neg() or x.layout is not torch.strided:
            raise _UnknownError
        storage, offset = x.untyped_storage(), int(x.storage_offset())
        holders = []
        for number, tensor in enumerate(tensors):
            if tensor is x:
                return number
            if tensor.untyped_storage()._cdata == storage._cdata:
                holders.append(number)
        if holders:
            offset -= int(tensors[holders[0]].storage_offset())
            if len(holders) > 1 or x.fake_device not in self._attributes:
                raise _UnknownError  # their distance may be another one the next time
        else:
            with in_kernel_invocation_manager(self):
                like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            if offset or storage.nbytes() != like.untyped_storage().nbytes():
                raise _UnknownError
            self._attributes.setdefault(x.fake_device, dict(x.__dict__))
        argument = holders[0] if holders else None
        return _Result(argument, x.shape, x.stride(), offset, x.dtype, x.fake_device)

    def _view(
        self, func: Any, tensors: list[Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Recipe:
        """Returns how to make a view by torch's kernel for tensors without memory, which is fast.

        It is empty if nothing was made on the device yet.
        """
        (x,) = tensors
        device = x.fake_device  # type: ignore[attr-defined]
        if device not in self._attributes:
            return _NEW
        with in_kernel_invocation_manager(self):
            view = func(*args, **kwargs)
            offset = view.storage_offset() - x.storage_offset()
        return Recipe((_Result(0, view.shape, view.stride(), offset, x.dtype, device),), None)

    def made(self, recipe: Recipe, tensors: list[Tensor]) -> Any:
        """Makes the results of an operation from the tensors among its arguments."""
        results, kind = recipe
        with torch._C._DisableTorchDispatch():  # the tensors inside of fake ones are plain
            if kind is None:
                return self._make(results[0], tensors)
            return kind([self._make(one, tensors) for one in results])

    def _make(self, result: _Result | int | None, tensors: list[Tensor]) -> Tensor | None:
        if type(result) is not _Result:
            return None if result is None else tensors[result]  # type: ignore[index]
        argument, shape, stride, offset, dtype, device = result
        if argument is None:
            plain = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
        else:
            whole = tensors[argument]
            plain = torch.empty(0, dtype=dtype, device=_META)
            plain.set_(whole.untyped_storage(), whole.storage_offset() + offset, shape, stride)
        made: Tensor = Tensor._make_subclass(
            FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(self._attributes[device])
        return made


def _is_constant(x: Any) -> bool:
    """Whether the values of a fake tensor are known."""
    return type(x) is FakeTensor and x.constant is not None


# --------------------------------------------------------------------------- what is launched


class Watch(TorchDispatchMode):
    """Notes kernels, and copies to the host for which the host waits.

    Attributes:
        storages: Keeps the log of memory; None keeps none.
    """

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log, self.fakes = log, fast_fakes()
        self.storages: MemoryTracker | None = None
        self._device = log.device.type
        # By the ids of recipes, which stay, or the keys of operations without one.
        self._works: dict[Any, Kernel | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping takes a sixth of the time

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:  # asked for more than anything else
            return args[0].fake_device
        if id(func) in _READS:
            if args[0].device.type == NAME:
                self._read()
            return 1.0 if args[0].is_floating_point() else 1
        if func is _SIZES:
            if args[0].device.type == NAME:
                self._read(needed=True)
            sizes, arrive, rows, experts = args
            found = stated.get().sizes(rows, experts, n := sizes.shape[1])
            return found + [sum(found[n:])] * len(arrive)
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            # Messages change no shapes, and a group without other processes sends nothing.
            with in_kernel_invocation_manager(self.fakes):
                out = func(*args, **kwargs)
        else:
            key, tensors, recipe = self.fakes.known(func, args, kwargs)
            if recipe is None or recipe is _NEW:
                out = func(*args, **kwargs)
            else:
                key, out = id(recipe), self.fakes.made(recipe, tensors)
            if self.log.kernels:
                work = self._works.get(key, _UNKNOWN) if key is not None else _UNKNOWN
                if work is _UNKNOWN:
                    work = self._works[key] = launched_work(func, args, kwargs, out, self._device)
                if work is not None:
                    self.log.launch(work, func, args, kwargs, out)
            if id(func) in _COPIES and out.device.type == "cpu":
                to_given = func.overloadpacket is _aten.copy_
                goes_on = kwargs.get("non_blocking") or (to_given and len(args) > 2 and args[2])
                if args[to_given].device.type == NAME and not goes_on:
                    self._read(copies=True)
        if self.storages is not None:
            self.storages.see(args, kwargs, out)
        return out

    def _read(self, copies: bool = False, needed: bool = False) -> None:
        """Notes that the host reads something from the device."""
        self.log.ends_kernel()
        place = self.log.places.here()
        read = Read(place._replace(module="") if needed else place, copies, needed)
        self.log.trace.reads.append(read)
        if self.log.kernels:
            self.log.trace.events.append(read)


@contextmanager
def watched_fakes(log: Log) -> Iterator[Watch]:
    """Makes all new tensors fake, and records in a rank's log what is read back from the device.

    A number that is read from a tensor is 1, with which a step takes its ordinary path.
    """
    with without_compiler(), fast_fakes(), Watch(log) as watch:
        yield watch
