"""Which submodules of a model a pipeline rank holds: those of its stages.

Links of several ranks may read the same parameter, such as the tied embedding or the relative
position biases of t5. All these ranks hold it. Each computes gradients from its own stages, which
are summed over exactly these ranks (gridformer.parallel.data.gradients); then all of them apply the
same update to their copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from gridformer.config import ModelConfig
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel.pipeline.partition import model_outline
from gridformer.parallel.sharding import info_of, set_info


def modules_of(config: ModelConfig, stages: tuple[range, ...], axes: Axes) -> set[str]:
    """Returns the names of the submodules that the links of this rank's stages run.

    Args:
        config: The model.
        stages: The links of each stage of the pipeline. Stage i runs on rank i mod pp.
        axes: The axes of the mesh.
    """
    links = model_outline(config).links()
    mine = stages[axes.pp.index :: axes.pp.size]
    return {path for stage in mine for i in stage for path in links[i].modules}


def keep_stages(model: Model, stages: tuple[range, ...], axes: Axes) -> None:
    """Deletes, in place, the submodules of a plain model that only other ranks run, if it has them.

    Names of the remaining parameters do not change. Submodules without parameters stay, because
    they need no memory.

    Args:
        model: The plain model. Its `stages` is set.
        stages: The links of each stage of the pipeline. Stage i runs on rank i mod pp.
        axes: The axes of the mesh.
    """
    model.stages = stages
    for path, ranks in _holders(model, axes.pp.size).items():
        if axes.pp.index not in ranks and any(True for _ in parameters_under(model, path)):
            parent, _, leaf = path.rpartition(".")
            container = model.get_submodule(parent)
            if isinstance(container, nn.ModuleDict):
                del container[leaf]
            else:
                delattr(container, leaf)


def parameters_under(model: Model, path: str) -> Iterator[nn.Parameter]:
    """Yields the parameters of a submodule; none of a layer that was not built.

    Args:
        model: The model of this rank.
        path: The dotted name of the submodule.
    """
    parent, _, leaf = path.rpartition(".")
    container = model.get_submodule(parent)
    if not isinstance(container, nn.ModuleDict) or leaf in container:
        yield from model.get_submodule(path).parameters()


def mark_shared(model: Model, axes: Axes) -> None:
    """Records in `ParamShard.stages` which ranks along pp hold a parameter, if several do."""
    shared = {path: ranks for path, ranks in _holders(model, axes.pp.size).items() if ranks[1:]}
    for name, parameter in model.named_parameters():
        path = name.rpartition(".")[0]
        while path and path not in shared:
            path = path.rpartition(".")[0]
        if path:
            info = info_of(parameter)
            info.shard = replace(info.shard, stages=shared[path])
            set_info(parameter, info)


def shared_sets(model: Model, pp: int) -> list[tuple[int, ...]]:
    """Returns the sets of ranks along pp that share a submodule of a model, sorted.

    The list is the same on all ranks, even if a shared submodule has no parameters on some of them
    (D&SP-cSub).
    """
    return sorted({ranks for ranks in _holders(model, pp).values() if ranks[1:]})


def _holders(model: Model, pp: int) -> dict[str, tuple[int, ...]]:
    """Returns, for each submodule that a link runs, the ranks along pp with such links."""
    links = model.links()
    held: dict[str, set[int]] = {}
    for number, stage in enumerate(model.stages):
        for link in (links[i] for i in stage):
            for path in link.modules:
                held.setdefault(path, set()).add(number % pp)
    return {path: tuple(sorted(ranks)) for path, ranks in held.items()}
