"""Tensors: what is noted on them, memory freed under them, and loops over their chunks.

Operators show neither freed memory nor repeated turns of a loop, so records of a step listen here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")

_FEWEST = 5  # turns of a loop that is shortened
_mark: Callable[[int], Callable[[], None]] | None = None
storage_listeners: list[Callable[[torch.UntypedStorage], object]] = []  # get resized storages


class TensorAttribute(Generic[T]):
    """An attribute of a unique name that may be set on any tensor, with values of one type."""

    def __init__(self, name: str) -> None:
        self._name = f"_gridformer_{name}"

    def get(self, tensor: Tensor) -> T | None:
        """Returns the value that was set on a tensor, or None."""
        return cast("T | None", getattr(tensor, self._name, None))

    def set(self, tensor: Tensor, value: T) -> None:
        """Sets the value on a tensor, instead of the one that it may have."""
        setattr(tensor, self._name, value)

    def remove(self, tensor: Tensor) -> None:
        """Removes the value from a tensor that has one."""
        delattr(tensor, self._name)


def map_tensors(change: Callable[[Tensor], Tensor], x: Any) -> Any:
    """Changes a tensor, or all in a dict, list or tuple; it stays the same one if they do."""
    if isinstance(x, Tensor):
        return change(x)
    ours = (
        x if isinstance(x, Mapping) else dict(enumerate(x)) if isinstance(x, list | tuple) else {}
    )
    new = {key: map_tensors(change, value) for key, value in ours.items()}
    if all(new[key] is value for key, value in ours.items()):
        return x
    if isinstance(x, Mapping):
        return new
    return type(x)(*new.values()) if hasattr(x, "_fields") else type(x)(new.values())


def free_storage(x: Tensor) -> None:
    """Frees a tensor's memory. The tensor, and views that autograd has saved, are valid again when
    the storage has been allocated (`allocate_storage`) and filled."""
    storage = x.untyped_storage()
    storage.resize_(0)
    for listener in storage_listeners:
        listener(storage)


def allocate_storage(x: Tensor) -> None:
    """Allocates uninitialized memory for a tensor whose storage was freed."""
    storage = x.untyped_storage()
    storage.resize_(x.numel() * x.element_size())
    for listener in storage_listeners:
        listener(storage)


def loop(items: Sequence[T]) -> Iterable[T]:
    """Returns the items of a loop; while a step is recorded, the first three and the last.

    The third turn stands for all but these. So each turn must do the same to memory and devices,
    except that the first ones begin sums and the last one may be smaller.
    """
    mark = _mark
    if mark is None or len(items) < _FEWEST:
        return items

    def few() -> Iterator[T]:
        yield from items[:2]
        ends = mark(len(items) - 4)
        yield items[2]
        ends()
        yield items[-1]

    return few()


@contextmanager
def shortened_loops(mark: Callable[[int], Callable[[], Any]]) -> Iterator[None]:
    """Shortens loops inside the context.

    `mark` is called when the third turn begins, with how many more turns it stands for, and returns
    what is to be called when it has ended.
    """
    global _mark
    before, _mark = _mark, mark
    try:
        yield
    finally:
        _mark = before


class DeviceEvent:
    """The time at which a device has done all work launched before, wherever the host is."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._time = time.perf_counter()

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Waits for this event and returns the seconds from an earlier one of the same device."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1e3


def measured(
    runs: Mapping[T, Callable[[], object]], device: torch.device, repeats: int = 5
) -> dict[T, float]:
    """Returns the median seconds of each run on a device, without runs that raise an error.

    All are repeated in turn, so that a clock that changes meanwhile changes all times.
    """
    times: dict[T, list[float]] = {}
    for name, run in runs.items():
        try:
            run()  # what is compiled or loaded first does not count
            times[name] = []
        except Exception:  # whatever a kernel raises that does not take these tensors
            continue
    for _ in range(repeats):
        for name, each in times.items():
            began = DeviceEvent(device)
            runs[name]()
            each.append(DeviceEvent(device).seconds_since(began))
    return {name: statistics.median(each) for name, each in times.items()}
