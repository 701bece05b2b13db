"""How the rows of a global batch are divided over replicas, micro-batches and a mesh axis."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gridformer.mesh import Axes
from gridformer.utils.batch import Batch, MicroBatch

# The keys of a batch whose tensors have an entry for every sequence.
_OF_SEQUENCES = ("tokens", "valid", "segments", "source", "source_valid", "at")


class RowSplit:
    """The rows of a global batch that this device reads.

    A global batch of B sequences is split into dp contiguous parts, each part into micro-batches,
    and each micro-batch over the grid's rows or over branches.

    Args:
        n_rows: B, which the number of parts must divide; see `n_parts`.
        micro_batches: Micro-batches of each replica.
        axes: The axes of the mesh.
    """

    def __init__(self, n_rows: int, micro_batches: int, axes: Axes) -> None:
        self.n_rows, self.n_micro, self.axes = n_rows, micro_batches, axes

    @staticmethod
    def n_parts(micro_batches: int, axes: Axes) -> int:
        """Returns the number of parts of a global batch.

        Args:
            micro_batches: The micro-batches of a step.
            axes: The axes of the mesh.
        """
        return axes.dp.size * micro_batches * axes.batch.size

    def rows(self, micro: int) -> slice:
        """Returns the rows of the global batch that are this device's micro-batch `micro`."""
        batch = self.axes.batch
        size, rest = divmod(self.n_rows, self.n_parts(self.n_micro, self.axes))
        assert not rest, "gridformer.parallel.validation.check_layout was not called"
        part = (self.axes.dp.index * self.n_micro + micro) * batch.size + batch.index
        return slice(part * size, (part + 1) * size)

    @cached_property
    def all_rows(self) -> NDArray[np.int64]:
        """The rows of the global batch that this device reads: its micro-batches' rows in order."""
        parts = [self.rows(micro) for micro in range(self.n_micro)]
        return np.concatenate([np.arange(part.start, part.stop) for part in parts])

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Divides the data of `all_rows` into micro-batches, which are views of it.

        Models see the n sequences of each sample of `data.task: choice` as rows of their own.
        """
        size = len(self.all_rows) // self.n_micro
        tokens = batch["tokens"]
        n = tokens.shape[1] if tokens.dim() == 3 else 1
        if n > 1:
            batch = {k: x.flatten(0, 1) if k in _OF_SEQUENCES else x for k, x in batch.items()}
        parts = {
            key: value.split(size * n if key in _OF_SEQUENCES else size)
            for key, value in batch.items()
        }
        rows = [self.rows(micro) for micro in range(self.n_micro)]
        return [
            MicroBatch(
                slice(n * rows[micro].start, n * rows[micro].stop),
                {key: part[micro] for key, part in parts.items()},
            )
            for micro in range(self.n_micro)
        ]
