"""What passes from one stage to the next, and what of it one device sends.

`Activations.hidden` always; in a decoder `memory` rides along, as long as a layer behind reads it.
Their gradients come back the same way. Shapes follow from the batch, which every stage reads.

    scheme               on one device          sent by one device
    single               [b, s, h]              all of it
    megatron             the same on c devices  1/c of it, gathered over col on arrival
    sequence parallel    [b, s/c, h]            all of it
    megatron_2d          [b/r, s/c, h]          all of it
    optimus              [b/r, s, h/c]          all of it
    D&SP                 [b/g, s, h]            all of it
    D&SP-cSub            on the first sub-grid  all of it; nothing between the others

The third line's slices are the scatter/gather of Narayanan et al. 2021, section 4.1: the link
between two nodes carries a tensor once, and not c times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gridformer import comm
from gridformer.config import LayoutConfig
from gridformer.mesh import Axes, Axis
from gridformer.models import Model
from gridformer.parallel.registry import spec_of
from gridformer.utils.batch import Batch

LABEL = "pipeline"


class StageIO:
    """The borders between a model's stages, as one device sees them."""

    def __init__(self, model: Model, layout: LayoutConfig, axes: Axes) -> None:
        links = model.links()
        self.dtype = model.compute_dtype or torch.get_default_dtype()
        self.width = model.config.hidden_size
        self.parts = 1  # of a sequence
        self.replicated_over = Axis("col")  # over which a tensor is the same
        boundary = spec_of(layout).boundary(layout)
        axis = axes[boundary.axis]
        if boundary.lies == "h":
            self.width //= axis.size
        if boundary.lies == "s":
            self.parts = axis.size
        if boundary.lies == "replicated":
            self.replicated_over = axis
        self.absent = boundary.lies == "first" and axis.index > 0
        self._reads = [
            _reads([link.memory for link in links], stage.start) for stage in model.stages
        ]

    def entering(self, stage: int, batch: Batch) -> dict[str, Tensor]:
        """Unfilled tensors for what comes into a stage, by its name in `Activations`."""
        device = torch.device("meta") if self.absent else batch["tokens"].device
        found = {}
        for name, key in self._reads[stage].items():
            b, s = batch[key].shape
            shape = (b, s // self.parts, self.width)
            found[name] = torch.empty(shape, dtype=self.dtype, device=device)
        return found

    def names(self, stage: int) -> tuple[str, ...]:
        """Of what comes into a stage; nothing into the first."""
        return tuple(self._reads[stage]) if stage else ()

    def slice(self, x: Tensor) -> Tensor:
        """What of a tensor this device sends, without its shape."""
        assert (x.dtype, x.shape[-1]) == (self.dtype, self.width), "the other side expects another"
        flat = x.detach().reshape(-1)
        if not self._scattered(x):
            return flat
        return flat.chunk(self.replicated_over.size)[self.replicated_over.index]

    def room(self, x: Tensor) -> Tensor:
        """Where the message for `x` is received: x's own memory, if all of it comes."""
        flat = x.detach().view(-1)
        return (
            flat.new_empty(flat.numel() // self.replicated_over.size)
            if self._scattered(x)
            else flat
        )

    def fill(self, x: Tensor, received: Tensor) -> None:
        """Make a tensor of what came, and of what came to the devices that have it alike."""
        if self._scattered(x):
            whole = comm.all_gather(received, self.replicated_over, 0, LABEL)
            x.detach().view(-1).copy_(whole)

    def _scattered(self, x: Tensor) -> bool:
        """Where it does not divide, everybody sends all of it."""
        return self.replicated_over.size > 1 and x.numel() % self.replicated_over.size == 0


def _reads(memory: list[str], start: int) -> dict[str, str]:
    """What comes before link `start`, and the key of the batch whose length it has."""
    if "makes" in memory[start:]:
        return {"hidden": "source"}
    return {"hidden": "tokens"} | ({"memory": "source"} if "reads" in memory[start:] else {})
