"""What all families are: a chain of links, each of which takes the state one step further.

A whole model runs all its links, a pipeline stage runs some that lie side by side. What passes from
one stage to the next is `State.x`, and `State.memory` where there is one; everything else a stage
makes for itself from the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from gridformer.batch import IGNORE, Batch
from gridformer.config import ModelConfig
from gridformer.models.blocks import (
    Attention,
    CrossAttention,
    CrossEntropy,
    DropoutClock,
    InParts,
    KVCache,
    LabelLoss,
    PaddingMask,
    Recompute,
    RecomputeMode,
    TiedHead,
    TokenEmbedding,
    added_to_scores,
)

# A model's losses, and the keys of a batch that hold their targets.
LOSSES = {"tokens": "targets", "pair": "pair", "labels": "labels"}


@dataclass
class State:
    """How far a batch has come.

    x: [b, s, h], what the next link reads. memory: [b, S, h], the encoder's result. outputs: logits
    by loss; unless `logits` are wanted, in the place of tokens' logits is what they are made of.
    caches, start: of generation, a cache a decoder layer, and the position of the first
    token. own: what links share within a stage.
    """

    x: Tensor | None = None
    memory: Tensor | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)
    logits: bool = False
    caches: Sequence[KVCache] | None = None
    start: int = 0
    own: dict[str, Tensor | None] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], Tensor | None]) -> Tensor | None:
        """What `make` makes, the first time it is asked for on this stage."""
        if name not in self.own:
            self.own[name] = make()
        return self.own[name]

    @property
    def hidden(self) -> Tensor:
        assert self.x is not None, "a link ran before the one that it follows"
        return self.x


@dataclass(frozen=True)
class Link:
    """A step of a model.

    holds: names of the submodules it runs; several links may hold one. memory: whether it makes
    `State.memory`, of what it finds in `State.x`, or reads it.
    """

    name: str
    run: Callable[[State, Batch], None]
    holds: tuple[str, ...]
    memory: Literal["", "makes", "reads"] = ""


class Model(nn.Module):
    """Base of the families. Build one on torch's meta device and hand it to
    `gridformer.parallel.parallelize`, which cuts it, allocates what this device holds and fills it.
    `compute_dtype` is the activations'. `stages`: of a pipeline, all ranks' together, as ranges of
    links; none where a device runs all links. `in_parts` says how many tokens' logits exist at a
    time when a loss is computed, `recompute` what is kept of blocks.
    """

    tokens: TokenEmbedding
    head: TiedHead

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ValueError("vocab_size must be known before a model is built")
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.stages: tuple[range, ...] = ()
        self.clock = DropoutClock()
        self.loss = CrossEntropy(config.label_smoothing)
        self.in_parts = InParts(tokens=0)
        self.recompute = Recompute()
        self.label_loss = LabelLoss()

    def recomputes(self, mode: RecomputeMode) -> None:
        """See gridformer.models.blocks.Recompute."""
        self.recompute.mode = mode
        for module in self.modules():
            if isinstance(module, Attention | CrossAttention):
                module.recompute = self.recompute

    def links(self) -> list[Link]:
        """The steps, in order."""
        raise NotImplementedError

    def outputs(
        self, batch: Batch, caches: Sequence[KVCache] | None = None, start: int = 0
    ) -> dict[str, Tensor]:
        """Logits by loss: `tokens` [b, s, v], and [b, labels] of branches the batch asks for."""
        return self._run(State(caches=caches, start=start, logits=True), batch)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Each loss summed over this device's targets; `counts` says over how many."""
        return self.losses_of(self._run(State(), batch), batch)

    def losses_of(self, outputs: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """The same from the outputs of a last stage: of what logits are made, and other logits."""
        losses: dict[str, Tensor] = {}
        for name, key in LOSSES.items():
            if key not in batch:
                continue
            if name == "tokens":
                losses[name] = self._token_loss(outputs[name], batch[key])
            else:
                losses[name] = self.label_loss(outputs[name], batch[key])
        return losses

    @staticmethod
    def counts(batch: Batch) -> dict[str, Tensor]:
        """How many targets each loss has in a batch."""
        # Not a sum, which would first make an integer of each truth.
        return {
            name: (batch[key] != IGNORE).count_nonzero()
            for name, key in LOSSES.items()
            if key in batch
        }

    @staticmethod
    def n_tokens(batch: Batch) -> Tensor:
        """Tokens that a batch makes a model read, padding left out. A decoder's are its targets."""

        def real(key: str, mask: str) -> Tensor:
            return batch.get(mask, torch.ones_like(batch[key], dtype=torch.bool)).count_nonzero()

        if "source" not in batch:
            return real("tokens", "valid")
        return real("source", "source_valid") + (batch["targets"] != IGNORE).count_nonzero()

    def loss_sum(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """The loss of tokens alone, of families that read nothing else."""
        return self.losses({"tokens": tokens_BS, "targets": targets_BS})["tokens"]

    def _run(self, state: State, batch: Batch) -> dict[str, Tensor]:
        for link in self.links():
            link.run(state, batch)
        return state.outputs

    def _mask(
        self, state: State, batch: Batch, padding: PaddingMask, causal: bool = False
    ) -> Tensor | None:
        """What layers of a model of one stack add to their scores, see `added_to_scores`."""
        if "valid" not in batch:
            return None

        def make() -> Tensor | None:
            valid, queries = padding(batch["valid"]), batch["tokens"].shape[1]
            return added_to_scores(queries, state.hidden.dtype, valid, causal=causal)

        return state.once("mask", make)

    def _predict(self, state: State, x_BSH: Tensor) -> None:
        """x: of which `before_head` and the head make logits."""
        state.outputs["tokens"] = self._logits(x_BSH) if state.logits else x_BSH

    def _before_head(self) -> tuple[nn.Module, ...]:
        """What nothing but the head reads, in the order that it is run in."""
        return ()

    def _logits(self, x_BSH: Tensor, prepared: Tensor | None = None) -> Tensor:
        """prepared: the table, see `TiedHead.prepare`."""
        for module in self._before_head():
            x_BSH = module(x_BSH)
        table = self.tokens.weight if prepared is None else prepared
        logits: Tensor = self.head(x_BSH, table, prepared is not None)
        return logits

    def _token_loss(self, x_BSH: Tensor, targets_BS: Tensor) -> Tensor:
        if not self.in_parts.cuts(x_BSH, targets_BS):
            loss: Tensor = self.loss(self._logits(x_BSH), targets_BS)
            return loss
        modules = (*self._before_head(), self.head)
        read = [parameter for module in modules for parameter in module.parameters()]
        table = self.head.prepare(self.tokens.weight, x_BSH.dtype)
        logits = partial(self._logits, prepared=table)
        return self.in_parts(x_BSH, targets_BS, logits, self.loss, [*read, table])

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.compute_dtype or x.dtype)
