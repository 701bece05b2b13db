"""Fake tensors that cost less time: what an operation returns is remembered.

torch's own `FakeTensorMode` takes some 300 microseconds an operation, even if it remembers the
result. A step runs the same few hundred operations on the same shapes again and again, so this mode
keeps, for each operation and the shapes of its arguments, how its results are made: an argument
itself, a view of an argument, or a new tensor.
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


class _Result(NamedTuple):
    """How one result of an operation is made.

    Attributes:
        argument: The number of the tensor among the arguments that it is, or is a view of; None if
            it is a new tensor.
        same: Whether it is that argument itself.
        shape: Its shape.
        stride: Its strides.
        offset: Where it begins in its storage.
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


class _Recipe(NamedTuple):
    """How the results of an operation are made.

    Attributes:
        results: Each result; None where the operation returns None.
        kind: The type of the sequence of results; None if there is only one.
    """

    results: tuple[_Result | None, ...]
    kind: type[tuple[Any, ...]] | type[list[Any]] | None


class _UnknownError(Exception):
    """An argument or a result has a property that recipes do not describe."""


@cache
def fast_fakes() -> FastFakeTensorMode:
    """Returns the mode of this process, which remembers what earlier estimates have run."""
    return FastFakeTensorMode()


class FastFakeTensorMode(FakeTensorMode):
    """A `FakeTensorMode` with the same results, in less time."""

    def __init__(self) -> None:
        super().__init__()
        self._recipes: dict[Any, _Recipe | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see MemoryTracker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        key, tensors = self.key_of(func, args, kwargs)
        recipe = None if key is None else self._recipes.get(key, _NEW)
        if recipe is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if recipe is not _NEW:
            return self._made(recipe, tensors)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._recipes[key] = self._recipe(func, tensors, out)
        return out

    def remembered(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the result of an operation if it is remembered, and otherwise NotImplemented.

        Callers that are in torch's way to this mode save the rest of the way by it.
        """
        if func.namespace == "c10d":
            # Messages change no shapes, and a group without other processes sends nothing.
            with in_kernel_invocation_manager(self):
                return func(*args, **kwargs)
        return self.remembered_of(*self.key_of(func, args, kwargs))

    def remembered_of(self, key: Any, tensors: list[Tensor]) -> Any:
        """Like `remembered`, for what `key_of` returns."""
        recipe = None if key is None else self._recipes.get(key)
        return NotImplemented if recipe is None else self._made(recipe, tensors)

    def _made(self, recipe: _Recipe, tensors: list[Tensor]) -> Any:
        with torch._C._DisableTorchDispatch():  # the tensors inside of fake ones are plain
            made = [None if one is None else self._make(one, tensors) for one in recipe.results]
        return made[0] if recipe.kind is None else recipe.kind(made)

    def key_of(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Tensor]]:
        """Returns the key of an operation, None if it has none, and the tensors among arguments."""
        tensors: list[Tensor] = []
        try:
            key = (func, self._key(args, tensors), self._key_of_named(kwargs, tensors))
            hash(key)
        except (_UnknownError, TypeError):  # or an argument that is not hashable
            return None, tensors
        return key, tensors

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
                    arg.storage_offset(),
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

    def _key_of_named(self, kwargs: dict[str, Any], tensors: list[Tensor]) -> tuple[Any, ...]:
        return (*kwargs, self._key([*kwargs.values()], tensors)) if kwargs else ()

    # ------------------------------------------------------------------ results

    def _recipe(self, func: Any, tensors: list[Tensor], out: Any) -> _Recipe | None:
        """Returns how to make what an operation has returned; None if it cannot be described."""
        if torch.Tag.inplace_view in func.tags or torch.Tag.data_dependent_output in func.tags:
            return None
        kind = type(out) if isinstance(out, tuple | list) else None
        if kind not in (None, tuple, list):
            return None
        try:
            found = [self._result(x, tensors) for x in (out if kind else [out])]
        except _UnknownError:
            return None
        storages = [x.untyped_storage()._cdata for x in (out if kind else [out]) if x is not None]
        given = {x.untyped_storage()._cdata for x in tensors}
        own = [storage for storage in storages if storage not in given]
        if len(own) != len(set(own)):
            return None
        return _Recipe(tuple(found), kind)

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
            argument = holders[0] if holders else None
        if argument is None:
            with in_kernel_invocation_manager(self):
                like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            if x.storage_offset() or storage.nbytes() != like.untyped_storage().nbytes():
                raise _UnknownError
        if x.is_conj() or x.is_neg() or x.layout is not torch.strided:
            raise _UnknownError
        return _Result(
            argument,
            bool(same),
            x.shape,
            x.stride(),
            int(x.storage_offset()),
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
                result.shape, result.stride, dtype=result.dtype, device="meta"
            )
        else:
            storage = tensors[result.argument].untyped_storage()
            plain = torch.empty(0, dtype=result.dtype, device="meta")
            plain.set_(storage, result.offset, result.shape, result.stride)
        made: Tensor = Tensor._make_subclass(
            FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=result.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(result.attributes)
        return made


_NEW = _Recipe((), None)  # of an operation that was not yet seen
