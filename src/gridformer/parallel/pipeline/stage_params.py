"""What a rank of a pipeline holds of a model: the submodules of its stages, some of them shared.

A parameter that links of several ranks read (the tied embedding, t5's biases of scores) lies on all
of these ranks. Each has gradients from its own stages; they are added up over exactly these ranks
(gridformer.parallel.data.gradients), and then all update their copies alike.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel.sharding import info_of, set_info


def keep_stages(model: Model, stages: tuple[range, ...], axes: Axes) -> None:
    """Drop from a plain model, in place, the parameters of links that run on other ranks.

    What is left keeps its names. Submodules without parameters stay: they cost nothing.
    """
    model.stages = stages
    holders = _holders(model, axes.pp.size)
    for path, ranks in holders.items():
        has_parameters = next(model.get_submodule(path).parameters(), None) is not None
        if axes.pp.index not in ranks and has_parameters:
            parent, _, leaf = path.rpartition(".")
            container = model.get_submodule(parent)
            if isinstance(container, nn.ModuleDict):
                del container[leaf]
            else:
                delattr(container, leaf)


def mark_shared(model: Model, axes: Axes) -> None:
    """Note in a parameter's shard which ranks along pp hold it, where several do."""
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
    """The sets of ranks along pp that share a submodule of a model; the same list on all ranks,
    whether what they share has parameters there (D&SP-cSub) or not."""
    return sorted({ranks for ranks in _holders(model, pp).values() if ranks[1:]})


def _holders(model: Model, pp: int) -> dict[str, tuple[int, ...]]:
    """By submodule that links hold, the ranks along pp that run such a link."""
    links = model.links()
    held: dict[str, set[int]] = {}
    for number, stage in enumerate(model.stages):
        for link in (links[i] for i in stage):
            for path in link.modules:
                held.setdefault(path, set()).add(number % pp)
    return {path: tuple(sorted(ranks)) for path, ranks in held.items()}
