"""Keeps the passes of a stage from gathering weights early for another stage of their rank.

Weights that must be gathered are linked in the order in which the model uses them, and each use
starts to gather the next one. With several stages a rank, what comes after the last weight of a
stage is mostly another pass of this stage, or a backward pass of another one. What was gathered for
the first weight of the next stage would take memory until that stage runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from gridformer.models import Model
from gridformer.models.blocks import Layer
from gridformer.parallel.data.fsdp import FSDPUnit, Gathering
from gridformer.parallel.tensor.summa import KeepGathered, WeightPrefetcher


def prefetch_within_stages(model: Model) -> None:
    """Unlinks weights of different stages.

    Args:
        model: A model whose `stages` is set, and whose weights are linked.
    """
    of_module = _stages_by_module(model)
    of_link = {link: of_module.get(module) for module, link in _links(model)}
    for link, stage in of_link.items():
        if link.after is not None and of_link[link.after] != stage:
            link.after.before = None
            link.after = None


def _links(model: Model) -> Iterator[tuple[nn.Module, WeightPrefetcher | FSDPUnit]]:
    """Yields what is linked: the products of Optimus, and the units of FSDP."""
    for module in model.modules():
        keep = vars(module).get("keep")
        if isinstance(keep, KeepGathered) and keep.weight is not None:
            yield module, keep.weight
    gathering = getattr(model, "gathering", None)
    if isinstance(gathering, Gathering):
        layers = (module for module in model.modules() if isinstance(module, Layer))
        yield from zip(layers, gathering.layers)


def _stages_by_module(model: Model) -> dict[nn.Module, frozenset[int]]:
    """Returns the stages whose links run a module, or a module that contains it."""
    found: dict[nn.Module, frozenset[int]] = {}
    links, modules = model.links(), dict(model.named_modules())
    for number, stage in enumerate(model.stages):
        for path in (path for i in stage for path in links[i].modules):
            for module in modules[path].modules() if path in modules else ():
                found[module] = found.get(module, frozenset()) | {number}
    return found
