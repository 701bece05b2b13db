"""Faster fake tensors: how the results of an operation are made is remembered.

torch's own `FakeTensorMode` takes some 300 microseconds an operation, even if it remembers the
result. A step runs the same few hundred operations on the same shapes again and again, so this mode
keeps, for each operation and the shapes of its arguments, how its results are made: an argument
itself, a view of an argument, or a new tensor.

The offset of a tensor in its storage decides only the offsets of its views, so it is not part of
what is remembered: the parts that a sum over chunks takes out of one tensor count as equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

from gridformer.record.no_compiler import without_compiler


class _Result(NamedTuple):
    """How one result of an operation is made.

    Attributes:
        argument: The number of the tensor among the arguments that it is, or is a view of; None if
            it is a new tensor.
        same: Whether it is that argument itself.
        shape: Its shape.
        stride: Its strides.
        offset: Where it begins in its storage; for a view how far behind its argument.
        dtype: Its dtype.
        attributes: Attributes of a fake tensor on its device.
        device: Its device.
    """

    argument: int | None
    same: bool
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    attributes: dict[str, Any]
    device: torch.device


class Recipe(NamedTuple):
    """How the results of an operation are made.

    Attributes:
        results: Each result; None where the operation returns None.
        kind: The type of the sequence of results; None if there is only one.
    """

    results: tuple[_Result | None, ...]
    kind: type[tuple[Any, ...]] | type[list[Any]] | None


_aten = torch.ops.aten
# Operations that return a part or a view of a tensor. Calls that take another part each time seldom
# repeat.
_PARTS = {
    *(_aten.slice.Tensor, _aten.select.int, _aten.view.default, _aten.as_strided.default),
    *(_aten.detach.default, _aten.t.default, _aten.transpose.int, _aten.permute.default),
    *(_aten.unsqueeze.default, _aten.expand.default),
}
_COUNT = torch.ops.aten.count_nonzero.default
_DEVICE = torch.ops.prim.device.default
_FILL = torch.ops.aten.fill_.Tensor
_LIFT = torch.ops.aten.lift_fresh.default
_META = torch.device("meta")


# torch's dispatch without the check for its compiler, which is not used here.
_real_dispatch = getattr(
    FakeTensorMode.__torch_dispatch__, "__wrapped__", FakeTensorMode.__torch_dispatch__
)


class _UnknownError(Exception):
    """An argument or a result has a property that recipes do not describe."""


@cache
def fast_fakes() -> FastFakeTensorMode:
    """Returns the mode of this process, which remembers what earlier estimates have run."""
    with without_compiler():
        return FastFakeTensorMode()


# By the id of an operation, which is kept because its id must not become that of another one.
_is_told: dict[int, tuple[bool, Any]] = {}


def _told(func: Any) -> bool:
    """Whether an argument of an operation is the offset of its result in a storage."""
    found = _is_told.get(id(func))
    if found is None:
        found = any(one.name == "storage_offset" for one in func._schema.arguments), func
        _is_told[id(func)] = found
    return found[0]


def _is_constant(x: Any) -> bool:
    """Whether the values of a fake tensor are known."""
    return type(x) is FakeTensor and x.constant is not None


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
        # Attributes of a fake tensor on a device that nothing else has set.
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping it takes time in each operation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func is _FILL and _is_constant(args[1]) and not _is_constant(args[0]):
            return args[0]  # torch writes a number as a constant, which has no key
        if func is _LIFT and type(args[0]) is Tensor:
            x = args[0]
            return self._constant(x) if x.numel() == 1 else self._empty(x.shape, x.dtype, x.device)
        kwargs = kwargs or {}
        key, tensors, recipe = self.known(func, args, kwargs)
        if recipe is None:
            if key in self._values:
                return self._values[key]
            return _real_dispatch(self, func, types, args, kwargs)
        if recipe is _NEW and func in _PARTS:
            recipe = self._part(func, tensors, args, kwargs) or _NEW
            if recipe is not _NEW:
                self._recipes[key] = recipe
        if recipe is not _NEW:
            return self._made(recipe, tensors)
        if func is _COUNT:  # for which torch's own way loads torch.distributed.tensor
            out = self._empty((), torch.int64, tensors[0].device)
        else:
            out = _real_dispatch(self, func, types, args, kwargs)
        self._recipes[key] = self._recipe(func, tensors, out)
        if not tensors and isinstance(out, int | torch.dtype):
            self._values[key] = out
        return out

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        """Returns a new tensor.

        torch's own way to fill a tensor with numbers of the host loads a part of its compiler.
        """
        kwargs = {"dtype": dtype, "device": device}
        empty = torch.ops.aten.empty.memory_format
        return self.__torch_dispatch__(empty, (), ([*shape],), kwargs)

    def _constant(self, number: Tensor) -> FakeTensor:
        """Returns a fake tensor with a known value, as `torch.tensor(1.0)` makes one.

        torch's own way, which is the same, loads a part of its compiler.
        """
        with torch._C._DisableTorchDispatch():
            constant = number.clone()
            meta = torch.empty_like(number, device="meta")
            found = FakeTensor(self, meta, number.device, constant=constant)
        self.fake_tensor_converter.add_constant_storage_mapping(found)
        return found

    def remembered(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the result of an operation if it is remembered, and otherwise NotImplemented.

        A caller inside torch's dispatch to this mode can call it to skip the rest of the dispatch.

        Args:
            func: The operation, as a dispatch mode sees it.
            args: Its arguments.
            kwargs: Its arguments by name.
        """
        if func.namespace == "c10d":
            # Messages change no shapes, and a group without other processes sends nothing.
            with in_kernel_invocation_manager(self):
                return func(*args, **kwargs)
        _, tensors, recipe = self.known(func, args, kwargs)
        return self.made(recipe, tensors)

    def made(self, recipe: Recipe | None, tensors: list[Tensor]) -> Any:
        """Returns the result of an operation, or NotImplemented if it is not remembered.

        Args:
            recipe: What `known` has returned.
            tensors: The tensors among the arguments.
        """
        return NotImplemented if recipe is None or recipe is _NEW else self._made(recipe, tensors)

    def _made(self, recipe: Recipe, tensors: list[Tensor]) -> Any:
        results, kind = recipe
        with torch._C._DisableTorchDispatch():  # the tensors inside of fake ones are plain
            if kind is None:
                (one,) = results
                return None if one is None else self._make(one, tensors)
            return kind([None if one is None else self._make(one, tensors) for one in results])

    def known(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Tensor], Recipe | None]:
        """Looks an operation up.

        Args:
            func: The operation, as a dispatch mode sees it.
            args: Its arguments.
            kwargs: Its arguments by name.

        Returns:
            Its key, None if it has none; the tensors among its arguments; and how its results are
            made, which is None if that cannot be described, and empty if it is not yet known.
        """
        tensors: list[Tensor] = []
        try:
            # Operations exist once, and torch computes their hashes in Python.
            key: tuple[Any, ...] = id(func), self._key(args, tensors)
            if kwargs:
                key += (*kwargs, self._key([*kwargs.values()], tensors))
            if _told(func):
                key += tuple([x.storage_offset() for x in tensors])
            return key, tensors, self._recipes.get(key, _NEW)
        except (_UnknownError, TypeError):  # or an argument that is not hashable
            return None, tensors, None

    # ------------------------------------------------------------------ arguments

    def _key(self, args: Sequence[Any], tensors: list[Tensor]) -> tuple[Any, ...]:
        """Returns what a result can depend on, and adds the tensors among arguments to a list."""
        found: list[Any] = []
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                attributes = arg.__dict__
                if attributes["constant"] is not None or attributes["fake_mode"] is not self:
                    raise _UnknownError
                found += (
                    arg.shape,
                    arg.stride(),
                    arg.dtype,
                    arg.fake_device,  # its place among the attributes differs between versions
                )
                tensors.append(arg)
            elif kind is list or kind is tuple:
                found.append(self._key(arg, tensors))
            elif isinstance(arg, Tensor):
                raise _UnknownError
            else:
                found += (kind, arg)  # 1, 1.0 and True are equal, but results depend on the type
        return tuple(found)

    # ------------------------------------------------------------------ results

    def _recipe(self, func: Any, tensors: list[Tensor], out: Any) -> Recipe | None:
        """Returns how to make what an operation has returned; None if it cannot be described."""
        if torch.Tag.inplace_view in func.tags or torch.Tag.data_dependent_output in func.tags:
            return None
        # Some operations return a tuple with names, which nobody sees above this mode.
        kind = next((kind for kind in (tuple, list) if isinstance(out, kind)), None)
        try:
            found = [self._result(x, tensors) for x in (out if kind else [out])]
        except _UnknownError:
            return None
        storages = [x.untyped_storage()._cdata for x in (out if kind else [out]) if x is not None]
        given = {x.untyped_storage()._cdata for x in tensors}
        own = [storage for storage in storages if storage not in given]
        if len(own) != len(set(own)):
            return None
        return Recipe(tuple(found), kind)

    def _part(
        self, func: Any, tensors: list[Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Recipe | None:
        """Returns how to make a part of a tensor; None if nothing was made on its device yet.

        torch's kernel for tensors without memory shows it in less time than the mode's own way.
        """
        (x,) = tensors
        attributes = self._attributes.get(x.fake_device)  # type: ignore[attr-defined]
        if attributes is None:
            return None
        with in_kernel_invocation_manager(self):
            part = func(*args, **kwargs)
            offset = part.storage_offset() - x.storage_offset()
        device = x.fake_device  # type: ignore[attr-defined]
        result = _Result(0, False, part.shape, part.stride(), offset, x.dtype, attributes, device)
        return Recipe((result,), None)

    def _result(self, x: Any, tensors: list[Tensor]) -> _Result | None:
        if x is None:
            return None
        if type(x) is not FakeTensor or x.constant is not None or x.requires_grad:
            raise _UnknownError
        same = [number for number, tensor in enumerate(tensors) if tensor is x]
        storage = x.untyped_storage()
        argument = same[0] if same else None
        if argument is None:
            holders = [
                number
                for number, tensor in enumerate(tensors)
                if tensor.untyped_storage()._cdata == storage._cdata
            ]
            if len(holders) > 1:
                raise _UnknownError  # their distance may be another one the next time
            argument = holders[0] if holders else None
        offset = int(x.storage_offset())
        if argument is not None:
            offset -= int(tensors[argument].storage_offset())
        if argument is None:
            with in_kernel_invocation_manager(self):
                like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            if offset or storage.nbytes() != like.untyped_storage().nbytes():
                raise _UnknownError
            self._attributes.setdefault(x.fake_device, dict(x.__dict__))
        if x.is_conj() or x.is_neg() or x.layout is not torch.strided:
            raise _UnknownError
        return _Result(
            argument,
            bool(same),
            x.shape,
            x.stride(),
            offset,
            x.dtype,
            dict(x.__dict__),
            x.fake_device,
        )

    @staticmethod
    def _make(result: _Result, tensors: list[Tensor]) -> Tensor:
        if result.same:
            assert result.argument is not None
            return tensors[result.argument]
        if result.argument is None:
            plain = torch.empty_strided(
                result.shape, result.stride, dtype=result.dtype, device=_META
            )
        else:
            whole = tensors[result.argument]
            plain = torch.empty(0, dtype=result.dtype, device=_META)
            offset = whole.storage_offset() + result.offset
            plain.set_(whole.untyped_storage(), offset, result.shape, result.stride)
        made: Tensor = Tensor._make_subclass(
            FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=result.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(result.attributes)
        return made


_NEW = Recipe((), None)  # of an operation that was not yet seen
