"""What each stage of a pipeline holds: a fraction of the layers of each stack, and the ends."""

from __future__ import annotations

from collections.abc import Sequence
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
class Held:
    """What a stage or a rank of a pipeline holds.

    Attributes:
        shares: The name of each stack, and the fraction that it has of the stack's layers.
        lookups: How many lookups of tokens it has, as a fraction of the model's.
        head: Whether it has the head.
    """

    shares: tuple[tuple[str, float], ...]
    lookups: float
    head: bool

    def share_of(self, product: Product) -> float:
        """Returns the fraction that it has of the products of a name."""
        if product.section != "head":
            return dict(self.shares)[stack_of(product)]
        return float(self.head)

    @property
    def outside_layers(self) -> Held:
        return Held(tuple((stack, 0.0) for stack, _ in self.shares), self.lookups, self.head)


def held_by_stages(run: RunConfig) -> list[Held]:
    """Returns what the stages of a pipeline hold, in order, by the real partition."""
    layout, stacks = run.layout, stacks_of(run)
    if layout.pp == 1:
        return [Held(tuple((stack, 1.0) for stack in stacks), 1.0, True)]
    names = link_names(run.model)
    # How work is divided does not depend on the number of sequences.
    work = Work(tokens=run.seq_len, source=run.source_len, sequences=1)
    found: list[Held] = []
    for stage in stages_of(run.model, layout.n_stages, work):
        mine = [names[i] for i in stage]
        shares = tuple(
            (stack, sum(_is_layer_of(stack, name) for name in mine) / n)
            for stack, n in stacks.items()
        )
        lookups = sum(name.endswith("embedding") for name in mine) / len(stacks)
        found.append(Held(shares, lookups, names[-1] in mine))
    return found


def together(stages: Sequence[Held]) -> Held:
    """Returns what a rank with these stages holds."""
    shares: dict[str, float] = {}
    for stage in stages:
        for stack, share in stage.shares:
            shares[stack] = shares.get(stack, 0.0) + share
    lookups = sum(stage.lookups for stage in stages)
    return Held(tuple(shares.items()), lookups, any(stage.head for stage in stages))


def _is_layer_of(stack: str, link: str) -> bool:
    return link.startswith(f"{stack}.layers." if stack else "layers.")
