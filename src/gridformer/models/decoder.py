"""Decoders: GPT-2, and the family of Llama-like models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gridformer.config import ModelConfig
from gridformer.models.blocks import (
    AttendingRows,
    Dropout,
    GatedLayer,
    KVCache,
    LayerNorm,
    PaddingMask,
    PositionEmbedding,
    RMSNorm,
    RotaryPositions,
    ScoreBias,
    SegmentBias,
    Spread,
    Style,
    StyledLayer,
    TiedHead,
    TokenEmbedding,
    UntiedHead,
    Window,
    added_to_scores,
)
from gridformer.models.model import Link, OneStack, build_layers
from gridformer.utils.batch import Batch


class DecoderOnly(OneStack):
    """Maps tokens [b, s] to logits [b, s, v], and to the logits of optional branches.

    The branch `labels` classifies one chosen token of each sequence: [b, n_labels]. The branch
    `answer` tells where an answer begins and ends: [b, 2, s].
    """

    norm: nn.Module
    window = 0  # how many keys a query sees at most; 0 means all of them

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.tokens = TokenEmbedding(config.vocab_size, config.hidden_size, config.init_std)
        self.dropout = Dropout(config.dropout, "embedding", self.dropout_rng)
        self.mask, self.rows = PaddingMask(), AttendingRows()

    def forward(
        self, tokens_BS: Tensor, caches: Sequence[KVCache] | None = None, start: int = 0
    ) -> Tensor:
        """Computes logits [b, s, v]; in generation the tokens continue one cache per layer."""
        return self.token_logits(self.hidden({"tokens": tokens_BS}, caches, start))

    def added_to_scores(
        self, batch: Batch, dtype: torch.dtype, start: int, caches: Sequence[KVCache] | None
    ) -> SegmentBias:
        """Returns the mask of padding, documents and windows; without them attention is causal."""
        if not self.window and "documents" not in batch and "valid" not in batch:
            return None
        tokens_BS, valid, documents = batch["tokens"], None, None
        past = min(start, self.window - 1) if caches and self.window else 0
        if "documents" in batch:  # padding has a number of its own
            documents = self.rows(batch["documents"])
        elif "valid" in batch:
            valid = self.mask(batch["valid"])
        fused = self.fused and not caches

        def of(queries: slice) -> ScoreBias | None:
            keys, near, seen, bounds = past + queries.stop, None, None, None
            if self.window:
                near = Window(self.window, keys, tokens_BS.device)
            if valid is not None:
                seen = valid[..., :keys]
            if documents is not None:
                bounds = self.sequence.document_bounds(documents, queries, keys)
            n = queries.stop - queries.start
            return added_to_scores(n, dtype, seen, None, True, fused, near, bounds)

        return self.sequence.each_segment(self.length(tokens_BS), of)

    def before_head(self) -> tuple[nn.Module, ...]:
        return (self.norm,)


class GPT2(DecoderOnly):
    """GPT-2 (Radford et al. 2019): pre-LayerNorm, learned positions, tied embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        h, std = config.hidden_size, config.init_std
        # The two projections into the residual stream are initialized with a smaller std, so that
        # the variance of the residual stream does not grow with depth (section 2.3).
        std_out = std / math.sqrt(2 * config.n_layers)
        style = Style(Spread(std, std, std, std_out, std, std_out), "gelu_tanh")
        self.positions = PositionEmbedding(config.max_seq_len, h, std)
        self.layers = build_layers(
            "layers",
            config.n_layers,
            lambda site: StyledLayer(config, style, self.dropout_rng, site, causal=True),
        )
        self.norm = LayerNorm(h, config.norm_eps, "head" if config.only_token_head else None)
        self.head = TiedHead()
        self._add_heads(std)

    def embed(self, batch: Batch, start: int) -> Tensor:
        tokens_BS = batch["tokens"]
        x: Tensor = self.tokens(tokens_BS)
        return x + self.positions(tokens_BS.shape[1], start, batch.get("positions"))

    def layer_inputs(
        self, batch: Batch, dtype: torch.dtype, start: int, caches: Sequence[KVCache] | None
    ) -> tuple[Any, ...]:
        return (self.added_to_scores(batch, dtype, start, caches),)

    def links(self) -> list[Link]:
        tied = ("tokens",) * self.config.token_head
        return self._links(
            ("tokens", "positions", "dropout"),
            ("mask", "rows"),
            ("norm", "head", *tied, "loss", *self._branch_modules()),
        )


class Llama(DecoderOnly):
    """Pre-RMSNorm, rotary positions, grouped queries, gated feed-forward, tied or untied head.

    The family describes Llama (Touvron et al. 2023; Meta 2024), Mistral (Jiang et al. 2023: a
    sliding window), Qwen2 (Yang et al. 2024: biases of q, k and v) and Qwen3 (Yang et al. 2025:
    norms of each head's queries and keys).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        h, v, std = config.hidden_size, config.vocab_size, config.init_std
        self.window = config.window
        self.rotary = RotaryPositions(config.head_width, config.rope_theta, config.rope_scaling)

        def layer(site: str) -> GatedLayer:
            dense = int(site.rpartition(".")[2]) < config.dense_layers
            return GatedLayer(config, self.dropout_rng, site, None if dense else self.balance)

        self.layers = build_layers("layers", config.n_layers, layer)
        self.norm = RMSNorm(h, config.norm_eps, "head" if config.only_token_head else None)
        tied = config.tied_head or not config.token_head  # which has no weights of its own
        self.head = TiedHead() if tied else UntiedHead(v, h, std)
        self._add_heads(std)

    def embed(self, batch: Batch, start: int) -> Tensor:
        x: Tensor = self.tokens(batch["tokens"])
        return x

    def layer_inputs(
        self, batch: Batch, dtype: torch.dtype, start: int, caches: Sequence[KVCache] | None
    ) -> tuple[Any, ...]:
        tokens_BS = batch["tokens"]
        places = self.rows(batch["positions"]) if "positions" in batch else None
        rotation = self.rotary(self.length(tokens_BS), start, tokens_BS.device, dtype, places)
        return rotation, self.added_to_scores(batch, dtype, start, caches)

    def links(self) -> list[Link]:
        tied = ("tokens",) * (self.config.tied_head and self.config.token_head)
        return self._links(
            ("tokens", "dropout"),
            ("mask", "rows", "rotary"),
            ("norm", "head", *tied, "loss", *self._branch_modules()),
        )
