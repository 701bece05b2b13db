"""The tensors that pass from one stage to the next, and what each device sends of them.

`Activations.hidden` is always sent. In a decoder, `memory` is sent along with it as long as a later
layer reads it. Gradients return the same way. Every stage reads the batch and so knows all shapes.

    scheme               tensor on one device      sent by one device
    single               [b, s, h]                 all of it
    megatron             the same on c devices     1/c of it, all-gathered over col on arrival;
                                                   all of it with `scatter_gather: false`
    sequence parallel    [b, s/c, h]               all of it
    megatron_2d          [b/r, s/c, h]             all of it
    optimus              [b/r, s, h/c]             all of it
    D&SP                 [b/g, s, h]               all of it
    D&SP-cSub            on the first sub-grid     all of it; the other sub-grids send nothing

Megatron's slices are the scatter/gather optimization of Narayanan et al. 2021, section 4.1: the
link between two nodes carries a tensor once instead of c times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gridformer import comm
from gridformer.config import LayoutConfig
from gridformer.mesh import Axes, Axis
from gridformer.models import Model
from gridformer.models.model import Link
from gridformer.parallel.registry import spec_of
from gridformer.utils.batch import Batch

LABEL = "pipeline"


class StageIO:
    """Shapes, slices and buffers of the tensors between stages, for one device.

    Attributes:
        absent: Whether this device sends and receives nothing (other sub-grids in D&SP-cSub).
    """

    def __init__(self, model: Model, layout: LayoutConfig, axes: Axes) -> None:
        links = model.links()
        self.dtype = model.compute_dtype or torch.get_default_dtype()
        self.width = model.config.hidden_size
        self.parts = 1  # shards of the sequence
        self.replicated_over = Axis("col")  # its ranks hold equal tensors
        boundary = spec_of(layout).boundary(layout)
        axis = axes[boundary.axis]
        if boundary.lies == "h":
            self.width //= axis.size
        if boundary.lies == "s":
            self.parts = axis.size
        if boundary.lies == "replicated" and layout.scatter_gather:
            self.replicated_over = axis
        self.absent = boundary.lies == "first" and axis.index > 0
        self._reads = [inputs_of(links, stage.start) for stage in model.stages]

    def entering(self, stage: int, batch: Batch) -> dict[str, Tensor]:
        """Allocates the inputs of a stage, uninitialized, by their names in `Activations`.

        Args:
            stage: The number of the stage.
            batch: The batch, whose tensors [b, s] give the sizes.

        Returns:
            Tensors [b, s / parts, width]; on the meta device on processes that hold none of the
            activations.
        """
        device = torch.device("meta") if self.absent else batch["tokens"].device
        found = {}
        for name, key in self._reads[stage].items():
            b, s = batch[key].shape
            shape = (b, s // self.parts, self.width)
            found[name] = torch.empty(shape, dtype=self.dtype, device=device)
        return found

    def names(self, stage: int) -> tuple[str, ...]:
        """Returns the names of the inputs of a stage; the first stage has none."""
        return tuple(self._reads[stage]) if stage else ()

    def slice(self, x: Tensor) -> Tensor:
        """Returns the part of a tensor that this device sends, flattened to one dimension."""
        assert (x.dtype, x.shape[-1]) == (self.dtype, self.width), "wrong dtype or width"
        flat = x.detach().reshape(-1)
        if not self.scattered(x):
            return flat
        return flat.chunk(self.replicated_over.size)[self.replicated_over.index]

    def receive_buffer(self, x: Tensor) -> Tensor:
        """Returns the buffer for the message that fills x: memory of x unless it is sliced."""
        flat = x.detach().view(-1)
        return (
            flat.new_empty(flat.numel() // self.replicated_over.size) if self.scattered(x) else flat
        )

    def fill(self, x: Tensor, received: Tensor) -> None:
        """Completes `x` from the received message; slices are all-gathered over their axis."""
        if self.scattered(x):
            whole = comm.all_gather(received, self.replicated_over, 0, LABEL)
            x.detach().view(-1).copy_(whole)

    def scattered(self, x: Tensor) -> bool:
        """Whether each device sends a slice. If x does not divide, each sends all of it."""
        return self.replicated_over.size > 1 and x.numel() % self.replicated_over.size == 0


def inputs_of(links: Sequence[Link], start: int) -> dict[str, str]:
    """Returns the inputs of a stage, each with the key of the batch that has its shape.

    Args:
        links: The links of the model.
        start: The number of the first link of the stage.
    """
    memory = [link.memory for link in links[start:]]
    if "makes" in memory:
        return {"hidden": "source"}
    return {"hidden": "tokens"} | ({"memory": "source"} if "reads" in memory else {})
