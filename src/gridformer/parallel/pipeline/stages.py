"""What a pipeline rank holds of a model, and the tensors that pass from stage to stage.

Links of several ranks may read the same parameter, such as the tied embedding. All these ranks hold
it, sum its gradients (gridformer.parallel.data.gradients) and apply the same update. Every stage
reads the batch and so knows the shapes of what is sent: `Activations.hidden`, and in a decoder
`memory` as long as a later layer reads it. Gradients return the same way.

A device sends all that it has of a tensor, except in two schemes:

    megatron     1/c of what c devices have, all-gathered over col on arrival (Narayanan et al.
                 2021, section 4.1); all of it with `scatter_gather: false`
    D&SP-cSub    only the first sub-grid has and sends it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes, Axis
from gridformer.models import Link, Model
from gridformer.models.blocks import Layer
from gridformer.parallel.data.fsdp import FSDPUnit, Gathering
from gridformer.parallel.pipeline.partition import model_outline
from gridformer.parallel.registry import spec_of
from gridformer.parallel.sharding import info_of, set_info
from gridformer.parallel.tensor.summa import GatheredWeight
from gridformer.utils.batch import Batch

LABEL = "pipeline"


def modules_of(
    config: ModelConfig, layout: LayoutConfig, stages: tuple[range, ...], axes: Axes
) -> set[str]:
    """Returns the names of the submodules that the links of this rank's stages run."""
    links = model_outline(config).links()
    mine = (stages[stage] for stage in layout.stages_on(axes.pp.index))
    return {path for stage in mine for i in stage for path in links[i].modules}


def keep_stages(model: Model, layout: LayoutConfig, stages: tuple[range, ...], axes: Axes) -> None:
    """Deletes, in place, the submodules of a plain model that only other ranks run, if it has them.

    Names of the remaining parameters do not change. Submodules without parameters stay, because
    they need no memory.
    """
    model.stages = stages
    for path, ranks in _holders(model, layout).items():
        if axes.pp.index not in ranks and any(True for _ in parameters_under(model, path)):
            parent, _, leaf = path.rpartition(".")
            container = model.get_submodule(parent)
            delattr(container, leaf)


def parameters_under(model: Model, path: str) -> Iterator[nn.Parameter]:
    """Yields the parameters of a submodule; none of a layer that was not built."""
    parent, _, leaf = path.rpartition(".")
    container = model.get_submodule(parent)
    if not isinstance(container, nn.ModuleDict | nn.ModuleList) or leaf in container._modules:
        yield from model.get_submodule(path).parameters()


def mark_shared(model: Model, layout: LayoutConfig) -> None:
    """Records in `ParamShard.stages` which ranks along pp hold a parameter, if several do."""
    shared = {path: ranks for path, ranks in _holders(model, layout).items() if ranks[1:]}
    for name, parameter in model.named_parameters():
        path = name.rpartition(".")[0]
        while path and path not in shared:
            path = path.rpartition(".")[0]
        if path:
            info = info_of(parameter)
            info.shard = replace(info.shard, stages=shared[path])
            set_info(parameter, info)


def shared_sets(model: Model, layout: LayoutConfig) -> list[tuple[int, ...]]:
    """Returns the sets of ranks along pp that share a submodule of a model, sorted.

    The list is the same on all ranks, even if a shared submodule has no parameters on some of them
    (D&SP-cSub).
    """
    return sorted({ranks for ranks in _holders(model, layout).values() if ranks[1:]})


def _holders(model: Model, layout: LayoutConfig) -> dict[str, tuple[int, ...]]:
    """Returns, for each submodule that a link runs, the ranks along pp with such links."""
    links = model.links()
    held: dict[str, set[int]] = {}
    for rank, stage in zip(layout.stage_ranks, model.stages):
        for link in (links[i] for i in stage):
            for path in link.modules:
                held.setdefault(path, set()).add(rank)
    return {path: tuple(sorted(ranks)) for path, ranks in held.items()}


def prefetch_within_stages(model: Model) -> None:
    """Unlinks weights of different stages of a rank, so that no pass gathers them for another one.

    Weights that must be gathered are linked in the order in which the model uses them, and each use
    starts to gather the next. What follows the last weight of a stage is mostly another pass of
    this stage: what was gathered for the next stage would take memory until that one runs.
    """
    modules, links = dict(model.named_modules()), model.links()
    stages_of: dict[nn.Module, set[int]] = defaultdict(set)
    for number, stage in enumerate(model.stages):
        for path in (path for i in stage for path in links[i].modules):
            for module in modules[path].modules() if path in modules else ():
                stages_of[module].add(number)
    linked: dict[GatheredWeight | FSDPUnit, set[int]] = {
        weight: stages_of[module]
        for module in modules.values()
        if isinstance(weight := vars(module).get("gathered_weight"), GatheredWeight)
    }
    gathering = getattr(model, "gathering", None)
    if isinstance(gathering, Gathering):
        layers = (module for module in modules.values() if isinstance(module, Layer))
        linked |= {unit: stages_of[layer] for layer, unit in zip(layers, gathering.layers)}
    for weight, stages in linked.items():
        if weight.after is not None and linked[weight.after] != stages:
            weight.after.before = None
            weight.after = None


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
        if boundary.activation_layout == "h" or boundary.h_over:
            self.width //= axes[boundary.h_over or boundary.axis].size
        if boundary.activation_layout == "s":
            self.parts = axis.size
        if boundary.activation_layout == "replicated" and layout.scatter_gather:
            self.replicated_over = axis
        self.absent = boundary.activation_layout == "first" and axis.index > 0
        self._reads = [inputs_of(links, stage.start) for stage in model.stages]

    def entering(self, stage: int, batch: Batch) -> dict[str, Tensor]:
        """Allocates the inputs [b, s / parts, width] of a stage by their names in `Activations`.

        They are on the meta device on processes that hold none of the activations.
        """
        device = torch.device("meta") if self.absent else batch["tokens"].device
        shapes = {name: batch[key].shape for name, key in self._reads[stage].items()}
        return {
            name: torch.empty(b, s // self.parts, self.width, dtype=self.dtype, device=device)
            for name, (b, s) in shapes.items()
        }

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
        n = self.replicated_over.size
        return flat.new_empty(flat.numel() // n) if self.scattered(x) else flat

    def fill(self, x: Tensor, received: Tensor) -> None:
        """Completes `x` from the received message; slices are all-gathered over their axis."""
        if self.scattered(x):
            whole = comm.all_gather(received, self.replicated_over, 0, LABEL)
            x.detach().view(-1).copy_(whole)

    def scattered(self, x: Tensor) -> bool:
        """Whether each device sends a slice. If x does not divide, each sends all of it."""
        return self.replicated_over.size > 1 and x.numel() % self.replicated_over.size == 0


def inputs_of(links: Sequence[Link], start: int) -> dict[str, str]:
    """Returns the inputs of a stage, each with the key of the batch that has its shape."""
    memory = [link.memory for link in links[start:]]
    if "makes" in memory:
        return {"hidden": "source"}
    return {"hidden": "tokens"} | ({"memory": "source"} if "reads" in memory else {})
