"""Makes one block stand for the equal blocks of all other ranks in a message.

Over gloo messages are joined from blocks, one for each rank, and taken apart into them. Blocks are
views, which hold no memory of their own, so for an estimate of memory one of each kind is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from gridformer.comm import collectives
from gridformer.mesh import Axis


@contextmanager
def blocks_once() -> Iterator[None]:
    """Makes messages use one block for all other ranks in the context. Values are then wrong."""
    with patch.multiple(
        collectives, without=_without, stacked=_stacked, concatenated=_concatenated
    ):
        yield


def _without(blocks: Tensor, index: int) -> list[Tensor]:
    return [blocks[index - 1]] * (len(blocks) - 1)


def _stacked(blocks: list[Tensor]) -> Tensor:
    return blocks[0].new_empty((len(blocks), *blocks[0].shape))


def _concatenated(rest: Tensor, mine: Tensor, axis: Axis, dim: int) -> Tensor:
    shape = [*mine.shape]
    shape[dim] *= len(rest)
    return torch.cat([rest.view(shape), mine], dim)
