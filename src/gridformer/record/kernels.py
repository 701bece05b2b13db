"""The kernels that the operators of a step launch on a device, and their sizes.

Every operator that computes something is one launch, as it is with torch's own kernels. Views and
empty tensors launch nothing. Products and attention carry their floating-point operations, by the
rules of `gridformer.train.flops`. A copy between the host and a GPU is bound by the link between
them, and everything else by the memory that it reads and writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from gridformer.record.events import Kernel

# Where the factors begin.
_PRODUCTS = {
    "mm": 0,
    "addmm": 1,
    "addmm_": 1,
    "bmm": 0,
    "baddbmm": 1,
    "add_product": 1,
    "write_product": 1,
    "grouped_product": 0,
    "grouped_sum": 0,
}
# Operators that launch nothing although their results are not marked as views.
_NOTHING = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"),
    *("detach", "alias", "lift_fresh", "set_", "resize_", "_local_scalar_dense", "item"),
    *("promote_types", "scalar_tensor", "_reshape_alias", "record_stream"),
}
FILLS = {"copy_", "fill_", "zero_", "uniform_", "normal_", "random_"}  # do not read their target
_COPIES = {"copy_", "_to_copy"}
# They read as much of their first argument as they return.
LOOKUPS = {"embedding", "gather", "index_select", "index", "take"}
# They change as many elements of their first argument as they are given.
SCATTERS = {"index_add_", "scatter_add_", "scatter_"}


def launched_work(
    func: Any, args: Any, kwargs: dict[str, Any], out: Any, device: str
) -> Kernel | None:
    """Returns what an operator launches on a type of device; None if nothing.

    Args:
        func: The operator, as a dispatch mode sees it, which was called with `args` and `kwargs`.
        out: Its result.
        device: The type of the device.
    """
    name = func.overloadpacket.__name__
    if func.namespace not in ("aten", "gridformer") or name in _NOTHING:
        return None
    results = [*tensors_in((out,))]
    # A result that the caller names (`out=`) is written like a new one.
    named = [value for key, value in kwargs.items() if key != "out"]
    given = [*tensors_in(args), *tensors_in(named)]
    if name in _COPIES and (copied := _between(given, results, device)) is not None:
        return Kernel(name, "copy", (), dtype_name(copied), 0, extent(copied))
    if not any(x.device.type == device for x in (results or given)):
        return None
    written = [*changed(func, args), *tensors_in((kwargs.get("out"),))]
    storages = {x.untyped_storage()._cdata for x in given}
    made = [x for x in results if x.untyped_storage()._cdata not in storages]
    if not made and not written:
        return None  # a view
    if name in _PRODUCTS:
        return _product(name, args[_PRODUCTS[name] :], (results or written)[0], given)
    if "attention" in name:
        return _attention(func, args, kwargs, [*made, *written], given)
    read: list[int] = [extent(x) for x in given if x.device.type == device]
    if name in FILLS:
        read = read[1:]
    elif name == "_foreach_copy_":
        read = [*map(extent, args[1])]
    elif name in LOOKUPS and given:
        read = [*read[1:], extent(results[0])]
    elif name in SCATTERS:  # read and written where the last argument says, or as much as it is
        size = given[-1].numel() * given[0].element_size()
        read, written = [*read[1:], 2 * size], []
    elif name == "nll_loss_forward":  # reads the logarithms of targets
        read = [*read[1:], given[1].numel() * given[0].element_size()]
    n_bytes = sum(read) + sum(map(extent, made)) + sum(map(extent, written))
    return Kernel(name, "memory", (), dtype_name((made or written or given)[0]), 0, n_bytes)


def _between(given: list[Tensor], results: list[Tensor], device: str) -> Tensor | None:
    """Returns the tensor that a copy moves between host and GPU; None if it stays on one."""
    if device == "cpu" or not given or not results:
        return None
    there = {given[-1].device.type, results[0].device.type}
    return given[-1] if there == {"cpu", device} else None


def _product(name: str, factors: Any, out: Tensor, given: list[Tensor]) -> Kernel:
    a, b = factors[0], factors[1]
    *batch, m, k = a.shape
    n = b.shape[-1]
    many = math.prod(batch)
    flop = 2 * many * m * n * k
    if name.startswith("grouped"):  # as if all groups were equal
        many = len(factors[2])
        each = -(-m // many)
        m, k = (each, k) if name == "grouped_product" else (k, each)
    order = "".join("n" if x.stride(-1) == 1 or x.shape[-1] == 1 else "t" for x in (a, b))
    n_bytes = sum(extent(x) for x in given) + extent(out)
    return Kernel(name, "product", (many, m, n, k), dtype_name(a), flop, n_bytes, order=order)


def _attention(
    func: Any, args: Any, kwargs: dict[str, Any], made: list[Tensor], given: list[Tensor]
) -> Kernel:
    """The backward pass counts for two products of each in the forward pass."""
    by_name = dict(zip((x.name for x in func._schema.arguments), args)) | kwargs
    name = func.overloadpacket.__name__
    backward = "backward" in name
    q, k = args[backward], args[1 + backward]
    (b, heads, queries, width), keys = q.shape, k.shape[2]
    v = args[2 + backward]
    # torch.utils.flop_counter counts the same, but it imports Triton. Several heads of q may share
    # one of k and v.
    flop = (1 + backward) * 2 * b * heads * queries * keys * (width + v.shape[3])
    n_bytes = sum(map(extent, given)) + sum(map(extent, made))
    shape = (b, heads, queries, keys, width, _hides(by_name))
    if func.namespace == "gridformer" and _is_plain(by_name):  # as in `gridformer.record.device`
        name = "sdpa_backward" if backward else "sdpa"
    return Kernel(name, "attention", shape, dtype_name(q), flop, n_bytes)


def _hides(given: dict[str, Any]) -> int:
    """Returns what the mask of attention hides: see `gridformer.record.events.Kernel.shape`."""
    causal = given.get("causal", given.get("is_causal", False))
    return max(1, given.get("window", 0)) if causal else 0


def _is_plain(given: dict[str, Any]) -> bool:
    """Whether PyTorch's kernel takes these arguments of gridformer's, too."""
    adds = any(given[name] is not None for name in ("valid", "bias", "documents", "counter"))
    return not adds and given["window"] == 0


def changed(func: Any, args: Any) -> list[Tensor]:
    """Returns the tensors that an operator writes into."""
    written: list[Tensor] = []
    if not func._schema.is_mutable:
        return written
    for argument, value in zip(func._schema.arguments, args):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tensors_in((value,))
    if func.overloadpacket.__name__ == "_fused_adamw_":  # names gradients, which it only reads
        gradients = {id(x) for x in args[1]}
        written = [x for x in written if id(x) not in gradients]
    return written


def tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    """Yields the tensors among values, and in lists and tuples among them."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from tensors_in(x)


def extent(x: Tensor) -> int:
    """Returns the bytes of the different elements of a tensor, which may be expanded."""
    n = math.prod(size for size, stride in zip(x.shape, x.stride()) if stride)
    return n * x.element_size() if x.numel() else 0


def dtype_name(x: Tensor) -> str:
    """Returns the name of a tensor's type, such as `float32`."""
    return str(x.dtype).removeprefix("torch.")
