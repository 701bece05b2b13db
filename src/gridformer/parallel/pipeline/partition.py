"""Splits a model into pipeline stages so that the largest work of a stage is minimal.

A model is a list of links (gridformer.models.Link), and a stage is a range of them. The work of a
link is the number of floating-point operations of its products: 2 n_in n_out per row of a linear
layer, 4 s d n per token of attention over s keys (d is the width of a head), and 2 h v per token of
the head. An embedding lookup costs next to nothing. The head is worth several layers because of its
vocabulary, so its stage gets fewer layers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from gridformer.config import ModelConfig, RunConfig
from gridformer.models import Model, blocks, build_model
from gridformer.models.model import only_layers
from gridformer.parallel.auto.products import Product, Work

_given: dict[tuple[ModelConfig, int], tuple[range, ...]] = {}  # see `with_stages`


def stages_of(config: ModelConfig, n_stages: int, work: Work) -> tuple[range, ...]:
    """Returns the range of links of each stage; the same on every rank.

    Raises:
        ValueError: The model has fewer links than stages.
    """
    return _given.get((config, n_stages)) or _stages_of(config, n_stages, work)


@lru_cache(maxsize=32)
def _stages_of(config: ModelConfig, n_stages: int, work: Work) -> tuple[range, ...]:
    return partition(link_costs(model_outline(config.outline), work), n_stages)


@contextmanager
def with_stages(config: ModelConfig, stages: Sequence[range]) -> Iterator[None]:
    """Makes `stages_of` return these stages for their number, inside the context."""
    _given[config, len(stages)] = tuple(stages)
    try:
        yield
    finally:
        del _given[config, len(stages)]


@lru_cache(maxsize=32)
def link_names(config: ModelConfig) -> tuple[str, ...]:
    """Returns the names of a model's links, in order."""
    return tuple(link.name for link in model_outline(config).links())


@lru_cache(maxsize=32)
def model_outline(config: ModelConfig) -> Model:
    """Returns a model on the meta device with only the first of the equal layers of each stack.

    It has all links, and must not be changed.
    """
    stacks = ("layers", "encoder.layers", "decoder.layers")
    with torch.device("meta"), only_layers([f"{stack}.0" for stack in stacks]):
        return build_model(config)


def link_costs(model: Model, work: Work) -> list[float]:
    """Returns the FLOPs of each link's forward pass for the tokens of `work`."""
    costs = dict[tuple[str, ...], float]()
    each = []
    for link in model.links():
        names = tuple(re.sub(r"(^|\.)layers\.\d+$", r"\1layers.0", name) for name in link.modules)
        if names not in costs:
            costs[names] = sum(_cost(one, model.config, work) for one in _modules(model, names))
        each.append(costs[names])
    return each


def partition(costs: Sequence[float], n_stages: int) -> tuple[range, ...]:
    """Splits links into consecutive, non-empty stages whose largest cost is minimal.

    Among those splits it takes one with the smallest sum of squared costs. Each of the two
    objectives is one dynamic program over (links, stages).

    Raises:
        ValueError: There are more stages than links.
    """
    if n_stages > len(costs):
        raise ValueError(
            f"{len(costs)} links cannot form {n_stages} pipeline stages: use at most {len(costs)}"
        )
    total = [0.0, *itertools.accumulate(costs)]
    largest, _ = _best(total, n_stages, lambda so_far, cost: max(so_far, cost), float("inf"))
    bound = largest * (1 + 1e-12)
    _, cuts = _best(total, n_stages, lambda so_far, cost: so_far + cost * cost, bound)
    return tuple(range(start, stop) for start, stop in itertools.pairwise(cuts))


def _best(
    total: Sequence[float], n_stages: int, join: Callable[[float, float], float], bound: float
) -> tuple[float, tuple[int, ...]]:
    """Minimizes `join` over stages that cost at most `bound`; returns it and the stage borders."""
    n = len(total) - 1
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, (0,))] + [None] * n
    for stage in range(1, n_stages + 1):
        through: list[tuple[float, tuple[int, ...]] | None] = [None] * (n + 1)
        for stop in range(stage, n - (n_stages - stage) + 1):
            here: tuple[float, int] | None = None
            for start in range(stop - 1, stage - 2, -1):  # among equals the first start counts
                before, cost = best[start], total[stop] - total[start]
                if cost > bound or (here is not None and join(0.0, cost) > here[0]):
                    break  # earlier starts cost more
                if before is not None:
                    value = join(before[0], cost)
                    if here is None or value <= here[0]:
                        here = value, start
            if here is not None:
                cuts = best[here[1]]
                assert cuts is not None
                through[stop] = here[0], (*cuts[1], stop)
        best = through
    last = best[n]
    assert last is not None
    return last


def _modules(model: Model, names: Sequence[str]) -> list[nn.Module]:
    return [module for name in names for module in model.get_submodule(name).modules()]


def _cost(module: nn.Module, config: ModelConfig, work: Work) -> float:
    each = max(1, work.sequences)
    inner = config.n_heads * config.head_width
    rows = {"tokens": work.tokens, "source": work.source, "sequences": work.sequences}
    match module:
        case blocks.Linear():
            n_in, n_out = module.weight.shape
            return 2.0 * n_in * n_out * rows[module.role.reads]
        case blocks.MergedLinear():
            return 2.0 * module.n_in * module.n_out * rows[module.role.reads]
        case blocks.Attention():
            n_tokens = rows[module.qkv.role.reads]
            return 4.0 * n_tokens * (n_tokens / each) * inner
        case blocks.CrossAttention():
            return 4.0 * work.tokens * (work.source / each) * inner
        case blocks.TiedHead():
            return 2.0 * config.hidden_size * config.vocab_size * work.tokens
    return 0.0


def stack_of(product: Product) -> str:
    """Returns the name of the stack of a product of a layer: "" in a model that has one."""
    return product.name.rpartition(".")[0]


def stacks_of(run: RunConfig) -> dict[str, int]:
    """Returns the number of layers of each stack."""
    model = run.model
    if model.two_stacks:
        return {"encoder": model.n_layers, "decoder": model.n_decoder_layers}
    return {"": model.n_layers}


@dataclass(frozen=True)
class StageShares:
    """Which part of a model a rank of a pipeline has.

    Attributes:
        layers: The name of each stack, and the fraction that it has of the stack's layers.
        lookups: How many lookups of tokens it has, as a fraction of the model's.
        head: Whether it has the head.
    """

    layers: tuple[tuple[str, float], ...]
    lookups: float
    head: bool

    def share_of(self, product: Product) -> float:
        """Returns the fraction that it has of the products of a name."""
        if product.section != "head":
            return dict(self.layers)[stack_of(product)]
        return float(self.head)


def shares_of_ranks(run: RunConfig) -> list[StageShares]:
    """Returns the parts of the ranks of a pipeline, in order, by the real partition."""
    layout, stacks = run.layout, stacks_of(run)
    if layout.pp == 1:
        return [StageShares(tuple((stack, 1.0) for stack in stacks), 1.0, True)]
    model = run.model
    if not model.vocab_size:  # it is not known yet
        model = model.model_copy(update={"vocab_size": 1})
    names = link_names(model)
    # How work is divided does not depend on the number of sequences.
    work = Work(tokens=run.seq_len, source=run.source_len, sequences=1)
    stages = stages_of(model, layout.n_stages, work)
    shares: list[StageShares] = []
    for rank in range(layout.pp):
        mine = [names[i] for stage in layout.stages_on(rank) for i in stages[stage]]
        layers = tuple(
            (stack, sum(name.startswith(f"{stack}.layers.".lstrip(".")) for name in mine) / n)
            for stack, n in stacks.items()
        )
        lookups = sum(name.endswith("embedding") for name in mine) / len(stacks)
        shares.append(StageShares(layers, lookups, names[-1] in mine))
    return shares
