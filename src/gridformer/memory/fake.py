"""Fake tensors, which have shapes but no memory, and what the code of a run needs from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from gridformer.parallel.tensor.summa import ChunkedGather
from gridformer.parallel.tensor.summa.chunks import even_chunks

if TYPE_CHECKING:
    from gridformer.trace.fast_fake import FastFakeTensorMode


@contextmanager
def fake_tensors() -> Iterator[FastFakeTensorMode]:
    """Makes all new tensors inside the context fake.

    A step reads a few numbers back from its tensors (losses, norms, counts). A fake tensor has no
    values and returns ones, with which a step takes its ordinary path.
    """
    # Both take time to import.
    from torch._subclasses.fake_tensor import FakeTensor

    from gridformer.trace.fast_fake import fast_fakes
    from gridformer.trace.no_compiler import without_compiler

    def ones(x: Tensor) -> list[float]:
        return [1.0] * x.numel()

    real = FakeTensor.tolist
    FakeTensor.tolist = ones  # type: ignore[method-assign, assignment]
    try:
        with without_compiler(), fast_fakes() as mode:
            yield mode
    finally:
        FakeTensor.tolist = real  # type: ignore[method-assign]


def skip_middle_chunks(model: nn.Module) -> None:
    """Makes chunked products compute only their first three chunks and the last one.

    Memory stays the same, because the fourth chunk holds as much as the third and so on; values do
    not.
    """
    for module in model.modules():
        for schedule in vars(module).values():
            if isinstance(schedule, ChunkedGather):
                schedule.split = _first_and_last


def _first_and_last(n: int, n_chunks: int) -> list[slice]:
    found = even_chunks(n, n_chunks)
    return [*found[:3], found[-1]] if len(found) > 4 else found
