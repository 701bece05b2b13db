"""The mean losses of a model over global batches, on any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gridformer import comm
from gridformer.data.samples.order import Rows
from gridformer.models import Model
from gridformer.parallel.tensor.linear import weights_kept
from gridformer.train.forward_backward import Finish, Passes
from gridformer.train.results import Evaluation
from gridformer.train.rows import RowSplit
from gridformer.utils.batch import Batch

# Reads rows of a step's global batch; see gridformer.utils.batch.
ReadRows = Callable[[Rows], Batch]


@torch.no_grad()
def mean_losses(
    model: Model,
    passes: Passes,
    split: RowSplit,
    device: torch.device,
    reads: Sequence[ReadRows],
    also: Finish | None = None,
) -> Evaluation:
    """Computes mean losses over several global batches, without dropout.

    All ranks call it together and get the same result.

    Args:
        model: This rank's part of the model.
        passes: Runs micro-batches through it.
        split: Which rows of a batch are this rank's.
        device: Where it computes.
        reads: For each global batch, a function that reads rows of it, called once each.
        also: Called with the last hidden states of each micro-batch, and the micro-batch, where its
            last link runs.
    """
    axes = split.axes
    model.eval()
    totals: dict[str, Tensor] = {}
    with weights_kept(model):
        for read in reads:
            batch = on_device(read(split.all_rows), device)
            counts = Model.counts(batch)
            found = passes.evaluate(split.micro_batches(batch), also)
            for name, loss in found.items():
                # All ranks of a pipeline read the same rows. Only the last stage has losses.
                count = counts[name] * int(axes.pp.index == 0)
                both = torch.stack((loss, count.to(loss.dtype)))
                totals[name] = totals[name] + both if name in totals else both
    # One of the ranks that hold the same rows counts them.
    sums = torch.stack([*totals.values()]) * int(axes.same_batch.index == 0)
    means = comm.all_reduce(sums, axes.world, label="metrics").tolist()
    parts = {name: loss / max(1.0, count) for name, (loss, count) in zip(totals, means)}
    return Evaluation(sum(parts.values()), parts)


def on_device(rows: Batch, device: torch.device) -> Batch:
    """Copies rows to a device."""
    return {key: value.to(device, non_blocking=True) for key, value in rows.items()}
