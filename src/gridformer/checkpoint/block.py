"""Blocks of global tensors, which are what a checkpoint consists of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gridformer.mesh import Axes
from gridformer.parallel.sharding import ParamShard

# By global name, a local tensor and its position in the global tensor.
Shards = Mapping[str, tuple[Tensor, ParamShard]]


@dataclass(frozen=True)
class TensorBlock:
    """A block of a global tensor.

    Attributes:
        tensor: The local tensor without its padding.
        size: The shape of the global tensor.
        offset: The index in the global tensor at which the block begins.
    """

    tensor: Tensor
    size: tuple[int, ...]
    offset: tuple[int, ...]

    @staticmethod
    def of(local: Tensor, shard: ParamShard) -> TensorBlock:
        """Returns the block that a local tensor with this shard holds, without its padding."""
        return TensorBlock(shard.valid(local.detach()), shard.size, shard.offset)

    @property
    def empty(self) -> bool:
        """Whether the local tensor is all padding, so that there is nothing to save or load."""
        return self.tensor.numel() == 0

    def overlap(
        self, offset: tuple[int, ...], size: tuple[int, ...]
    ) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Returns where another block of the same global tensor and this one overlap.

        Args:
            offset: Where the other block begins in the global tensor.
            size: Its size along each dimension.

        Returns:
            The slices of the other block and those of this one, whose elements are the same; None
            if the blocks do not overlap.
        """
        there, here = [], []
        for mine, n, other, m in zip(self.offset, self.tensor.shape, offset, size):
            begin, end = max(mine, other), min(mine + n, other + m)
            if begin >= end:
                return None
            there.append(slice(begin - other, end - other))
            here.append(slice(begin - mine, end - mine))
        return tuple(there), tuple(here)


MOMENTS = ("exp_avg", "exp_avg_sq")
PARAMETER = "model."  # before the names of parameters


def with_moments(parameters: Shards) -> Shards:
    """Returns parameters, and under the names of their two moments the parameters again.

    The moments do not exist before the first step, and they will have the sizes of their
    parameters.
    """
    moments = {
        f"{moment}.{name.removeprefix(PARAMETER)}": shard
        for name, shard in parameters.items()
        for moment in MOMENTS
    }
    return {**parameters, **moments}


def written_here(shards: Shards, axes: Axes) -> dict[str, TensorBlock]:
    """Returns the blocks that this rank writes. Exactly one of the replicas of a block writes it.

    Every replica computes by itself which one that is, because all of them hold the same blocks in
    the same order: each block goes to the replica that has the fewest bytes so far. If several
    stages share a block, the first one writes it.

    Args:
        shards: By name, each tensor that this rank updates, and its position in the global tensor.
        axes: The axes of the mesh.
    """
    loads: dict[str, list[int]] = defaultdict(list)
    found = {}
    for name, (local, shard) in shards.items():
        if shard.stages and axes.pp.index != shard.stages[0]:
            continue
        block = TensorBlock.of(local, shard)
        if block.empty:
            continue
        if shard.replicas is not None:
            axis = axes[shard.replicas]
            load = loads[axis.name] = loads[axis.name] or [0] * axis.size
            writer = load.index(min(load))
            load[writer] += block.tensor.numel() * block.tensor.element_size()
            if writer != axis.index:
                continue
        found[name] = block
    return found
