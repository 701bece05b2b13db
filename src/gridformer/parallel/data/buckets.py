"""Buckets: small tensors that travel together in one message."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from gridformer.models.blocks import Layer

BUCKET_BYTES = 25 << 20  # the size of a message; one larger tensor travels alone
ALONE_BYTES = 1 << 20  # a tensor of this size that needs no bucket travels alone

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


def by_layer(model: nn.Module) -> list[list[nn.Parameter]]:
    """Returns the parameters of a model in its order, divided where a layer begins or ends."""
    layers = (module for module in model.modules() if isinstance(module, Layer))
    number = {p: i for i, layer in enumerate(layers) for p in layer.parameters()}
    grouped = itertools.groupby(model.parameters(), lambda p: number.get(p, -1))
    return [[*unit] for _, unit in grouped]


def in_buckets(tensors: Iterable[Tensor], collective: Callable[[Tensor], object]) -> None:
    """Applies a collective in place to flat tensors [n], the members of `together` as one."""
    for members in together(tensors):
        flats = [tensor.reshape(-1) for tensor in members]
        flat = torch.cat(flats) if len(flats) > 1 else flats[0]
        collective(flat)
        if len(flats) > 1 or not members[0].is_contiguous():  # else flat is a view
            for tensor, part in zip(members, flat.split([len(one) for one in flats])):
                tensor.copy_(part.view_as(tensor))


def together(tensors: Iterable[AnyTensor]) -> Iterator[Sequence[AnyTensor]]:
    """Yields each large tensor, and after them all small ones of each type.

    So a layer more sends its large tensors once more, and lengthens a message of small ones.
    """
    small: dict[torch.dtype, list[AnyTensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.nbytes >= ALONE_BYTES:
            yield [tensor]
        else:
            small[tensor.dtype].append(tensor)
    yield from small.values()


def buckets(
    tensors: Iterable[AnyTensor], limit: int | None = None
) -> Iterator[Sequence[AnyTensor]]:
    """Yields tensors in buckets of one dtype, at most 25 MiB each, or a single larger tensor.

    Small tensors before and after a larger one share a bucket.
    """
    limit = BUCKET_BYTES if limit is None else min(limit, BUCKET_BYTES)
    by_type: dict[torch.dtype, list[AnyTensor]] = defaultdict(list)
    size: dict[torch.dtype, int] = defaultdict(int)
    for tensor in tensors:
        if tensor.nbytes >= limit:
            yield [tensor]
            continue
        if by_type[tensor.dtype] and size[tensor.dtype] + tensor.nbytes > limit:
            yield by_type.pop(tensor.dtype)
            size[tensor.dtype] = 0
        by_type[tensor.dtype].append(tensor)
        size[tensor.dtype] += tensor.nbytes
    yield from filter(None, by_type.values())
