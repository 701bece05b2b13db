"""BERT (Devlin et al. 2019): an encoder trained on masked tokens and on sentence pairs.

With `norm_position: post`, as published, LayerNorm follows each residual addition. With `pre` it is
applied to the input of each sub-layer and once at the end, which Megatron needed to train more than
336M parameters (Shoeybi et al. 2019, section 5.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gridformer.config import ModelConfig
from gridformer.models.blocks import (
    Classifier,
    Dropout,
    Init,
    KVCache,
    LayerNorm,
    Linear,
    PaddingMask,
    PositionEmbedding,
    Role,
    ScoreBias,
    SegmentEmbedding,
    Spread,
    Style,
    StyledLayer,
    TiedHead,
    TokenEmbedding,
    added_to_scores,
)
from gridformer.models.model import Link, OneStack, build_layers
from gridformer.utils.batch import Batch


class BERT(OneStack):
    """Maps tokens [b, s] to logits [b, s, v] and to the logits of optional branches.

    The branch `pair` reads the first token ([CLS]) and tells whether sentence B follows sentence A:
    [b, 2]. The branch `labels` classifies one chosen token of each sequence: [b, n_labels]. The
    branch `answer` tells where an answer begins and ends: [b, 2, s]. Without `token_head` there are
    no logits of tokens, as in models that are fine-tuned.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        h, v, std = config.hidden_size, config.vocab_size, config.init_std
        self.post = config.norm_position == "post"
        style = Style(Spread(std, std, std, std, std, std), "gelu")
        self.tokens = TokenEmbedding(v, h, std)
        self.positions = PositionEmbedding(config.max_seq_len, h, std)
        self.segments = SegmentEmbedding(h, std)
        if self.post:
            self.embedding_norm = LayerNorm(h, config.norm_eps)
        self.dropout = Dropout(config.dropout, "embedding", self.dropout_rng)
        self.mask = PaddingMask()
        self.layers = build_layers(
            "layers",
            config.n_layers,
            lambda site: StyledLayer(config, style, self.dropout_rng, site, causal=False),
        )
        if not self.post:
            self.norm = LayerNorm(h, config.norm_eps)
        if config.token_head:
            self.transform = Linear(h, h, Role("transform", "head"), Init(std=std))
            self.gelu = nn.GELU()
            self.head_norm = LayerNorm(h, config.norm_eps, "head")
        self.head = TiedHead(biases=v if config.token_head else 0)
        if config.sentence_pair:
            self.pair = Classifier(h, 2, std)
        self._add_heads(std)

    def forward(
        self,
        tokens_BS: Tensor,
        segments_BS: Tensor | None = None,
        valid_BS: Tensor | None = None,
    ) -> Tensor:
        """Computes logits [b, s, v].

        Args:
            segments_BS: 0 for tokens of sentence A, 1 for sentence B [b, s]; None means all 0.
            valid_BS: False where a token is padding [b, s]; None means there is no padding.
        """
        batch = {"tokens": tokens_BS}
        if segments_BS is not None:
            batch["segments"] = segments_BS
        if valid_BS is not None:
            batch["valid"] = valid_BS
        return self.token_logits(self.hidden(batch))

    def embed(self, batch: Batch, start: int) -> Tensor:
        tokens_BS = batch["tokens"]
        segments_BS = batch.get("segments", torch.zeros_like(tokens_BS))
        hidden = self.tokens(tokens_BS) + self.positions(
            tokens_BS.shape[1], 0, batch.get("positions")
        )
        hidden = hidden + self.segments(segments_BS)
        if self.post:
            hidden = self.embedding_norm(hidden)
        x: Tensor = hidden
        return x

    def layer_inputs(
        self, batch: Batch, dtype: torch.dtype, start: int, caches: Sequence[KVCache] | None
    ) -> tuple[Any, ...]:
        assert not caches, "an encoder sees all tokens at once"
        if "valid" not in batch:
            return (None,)
        valid = self.mask(batch["valid"])

        def of(queries: slice) -> ScoreBias | None:
            n = queries.stop - queries.start
            return added_to_scores(n, dtype, valid, fused=self.fused)

        return (self.sequence.each_segment(self.length(batch["tokens"]), of),)

    def after_layers(self, hidden_BSH: Tensor) -> Tensor:
        if self.post:
            return hidden_BSH
        normed: Tensor = self.norm(hidden_BSH)
        return normed

    def branch_logits(self, hidden_BSH: Tensor, batch: Batch) -> dict[str, Tensor]:
        logits = self._branch_logits(hidden_BSH, batch)
        if "pair" in batch:
            logits["pair"] = self.pair(hidden_BSH, torch.zeros_like(batch["pair"]))
        return logits

    def before_head(self) -> tuple[nn.Module, ...]:
        return self.transform, self.gelu, self.head_norm

    def links(self) -> list[Link]:
        first = ("tokens", "positions", "segments", "dropout") + ("embedding_norm",) * self.post
        config = self.config
        words = ("transform", "head_norm", "head", "tokens") if config.token_head else ("head",)
        last = (*("norm",) * (not self.post), *words, "loss")
        branches = ("pair",) * config.sentence_pair + self._branch_modules()
        return self._links(first, ("mask",), last + branches)
