"""What all families share: how a model is run, whole or in pipeline stages, and its losses.

A family says in `run` how a batch becomes hidden states, from top to bottom, and in `token_logits`
and `branch_logits` what becomes of the last of them. A whole model runs all of `run`; a pipeline
stage runs the links that it is given, and hands its `Activations` to the next.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gridformer.config import ModelConfig
from gridformer.models.blocks import (
    Attention,
    CrossAttention,
    CrossEntropy,
    DropoutClock,
    KVCache,
    LabelLoss,
    Recompute,
    RecomputeMode,
    TiedHead,
    TokenEmbedding,
    chunked_loss,
    places_per_chunk,
)
from gridformer.utils.batch import IGNORE, Batch

# A model's losses, and the keys of a batch that hold their targets.
LOSSES = {"tokens": "targets", "pair": "pair", "labels": "labels"}


@dataclass
class Activations:
    """What one pipeline stage hands to the next.

    hidden: [b, s, h], or [b, S, h] of a source. memory: [b, S, h], the encoder's result, once there
    is one. Everything else a stage makes for itself from the batch.
    """

    hidden: Tensor | None = None
    memory: Tensor | None = None

    @staticmethod
    def taken(entering: Activations | None) -> tuple[Any, Any]:
        """Hidden states and memory of what comes in, which is emptied: so what another stage has
        sent is freed as soon as it is used. Nothing comes into the first stage."""
        if entering is None:
            return None, None
        found = entering.hidden, entering.memory
        entering.hidden = entering.memory = None
        return found


@dataclass(frozen=True)
class Link:
    """A part of a model that a pipeline does not cut: the embedding, a layer, or the head.

    modules: names of the submodules that it runs; several links may run one. memory: whether it
    makes `Activations.memory`, of the hidden states that come in, or reads it.
    """

    name: str
    modules: tuple[str, ...]
    memory: Literal["", "makes", "reads"] = ""


class Model(nn.Module):
    """Base of the families. Build one on torch's meta device and hand it to
    `gridformer.parallel.parallelize`, which cuts it, allocates what this device holds and fills it.

    Attributes:
        compute_dtype: of activations.
        stages: of a pipeline, all ranks' together, as ranges of links; none where a device runs all
            links.
        loss_chunk_tokens: how many tokens' logits exist at a time when a loss is computed; 0: all.
        recompute: which activations of blocks are kept for the backward pass.
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
        self.label_loss = LabelLoss()
        self.loss_chunk_tokens = 0
        self.recompute = Recompute()

    # ------------------------------------------------------------------ what a family says

    def links(self) -> list[Link]:
        """The parts between which a pipeline may cut, in the order in which `run` runs them."""
        raise NotImplementedError

    def run(
        self,
        batch: Batch,
        entering: Activations | None = None,
        links: Collection[str] | None = None,
        caches: Sequence[KVCache] | None = None,
        start: int = 0,
    ) -> Activations:
        """A batch through the model, up to its last hidden states [b, s, h].

        Args:
            entering: what the stage before handed over; it is emptied.
            links: names of the links to run, which lie side by side; None: all.
            caches, start: of generation: one cache a decoder layer, and the position of the first
                token.
        """
        raise NotImplementedError

    def token_logits(self, hidden_BSH: Tensor, table: Tensor | None = None) -> Tensor:
        """Logits [b, s, v] of the last hidden states, or of some places of them.

        table: that of the tokens as `TiedHead.prepare` made it, where it is read many times.
        """
        raise NotImplementedError

    def head_modules(self) -> tuple[nn.Module, ...]:
        """The modules that `token_logits` runs."""
        raise NotImplementedError

    def branch_logits(self, hidden_BSH: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Logits of the other outputs that a batch asks for, by loss."""
        return {}

    # ------------------------------------------------------------------ the whole model

    def hidden(
        self, batch: Batch, caches: Sequence[KVCache] | None = None, start: int = 0
    ) -> Tensor:
        """The last hidden states [b, s, h]; see `run`."""
        hidden = self.run(batch, caches=caches, start=start).hidden
        assert hidden is not None
        return hidden

    def logits(self, batch: Batch) -> dict[str, Tensor]:
        """By loss: `tokens` [b, s, v], and [b, labels] of branches the batch asks for."""
        hidden = self.hidden(batch)
        return {"tokens": self.token_logits(hidden)} | self.branch_logits(hidden, batch)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Each loss summed over this device's targets; `counts` says over how many."""
        return self.losses_of(self.hidden(batch), batch)

    def losses_of(self, hidden_BSH: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The same from the last hidden states: what a pipeline's last stage does."""
        logits = self.branch_logits(hidden_BSH, batch)
        losses: dict[str, Tensor] = {}
        for name, key in LOSSES.items():
            if key not in batch:
                continue
            if name == "tokens":
                losses[name] = self._token_loss(hidden_BSH, batch[key])
            else:
                losses[name] = self.label_loss(logits[name], batch[key])
        return losses

    def loss_sum(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """The loss of tokens alone, of families that read nothing else."""
        return self.losses({"tokens": tokens_BS, "targets": targets_BS})["tokens"]

    def _token_loss(self, hidden_BSH: Tensor, targets_BS: Tensor) -> Tensor:
        places = places_per_chunk(hidden_BSH, targets_BS, self.loss_chunk_tokens)
        if places >= hidden_BSH.shape[1] or hidden_BSH.is_meta:  # on meta another device has it
            loss: Tensor = self.loss(self.token_logits(hidden_BSH), targets_BS)
            return loss
        table = self.head.prepare(self.tokens.weight, hidden_BSH.dtype)
        parameters = [p for module in self.head_modules() for p in module.parameters()]
        head = partial(self.token_logits, table=table)
        return chunked_loss(hidden_BSH, targets_BS, places, head, self.loss, [*parameters, table])

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

    # ------------------------------------------------------------------ for the families

    def recomputes(self, mode: RecomputeMode) -> None:
        """See gridformer.models.blocks.Recompute."""
        self.recompute.mode = mode
        for module in self.modules():
            if isinstance(module, Attention | CrossAttention):
                module.recompute = self.recompute

    def _link_names(self) -> list[str]:
        return [link.name for link in self.links()]

    @staticmethod
    def _layers(
        layers: nn.ModuleDict, prefix: str, links: Collection[str]
    ) -> list[tuple[int, nn.Module]]:
        """Of a stack the layers that are to be run, with their numbers."""
        return [(int(i), layer) for i, layer in layers.items() if f"{prefix}.{i}" in links]

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.compute_dtype or x.dtype)

    def _tied_head(self, x_BSH: Tensor, table: Tensor | None) -> Tensor:
        logits: Tensor
        if table is None:
            logits = self.head(x_BSH, self.tokens.weight)
        else:
            logits = self.head(x_BSH, table, prepared=True)
        return logits
