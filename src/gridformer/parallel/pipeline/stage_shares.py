"""Which part of a model each rank of a pipeline has: of the layers of each stack, and the ends."""

from __future__ import annotations

from dataclasses import dataclass

from gridformer.config import RunConfig
from gridformer.parallel.auto.products import Product, Work
from gridformer.parallel.pipeline.partition import link_names, stages_of


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
    found: list[StageShares] = []
    for rank in range(layout.pp):
        mine = [names[i] for stage in stages[rank :: layout.pp] for i in stage]
        layers = tuple(
            (stack, sum(_is_layer_of(stack, name) for name in mine) / n)
            for stack, n in stacks.items()
        )
        lookups = sum(name.endswith("embedding") for name in mine) / len(stacks)
        found.append(StageShares(layers, lookups, names[-1] in mine))
    return found


def _is_layer_of(stack: str, link: str) -> bool:
    return link.startswith(f"{stack}.layers." if stack else "layers.")
