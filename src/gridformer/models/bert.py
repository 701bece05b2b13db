"""BERT (Devlin et al. 2019): an encoder trained on masked tokens and on sentence pairs.

With `norm_position: post`, as published, LayerNorm follows each residual addition. With `pre` it is
applied to the input of each sub-layer and once at the end, which Megatron needed to train more than
336M parameters (Shoeybi et al. 2019, section 5.3).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
    SegmentEmbedding,
    Spread,
    Style,
    StyledLayer,
    TiedHead,
    TokenEmbedding,
    added_to_scores,
)
from gridformer.models.held_layers import layer_numbers
from gridformer.models.model import Activations, Link, Model
from gridformer.utils.batch import Batch


class BERT(Model):
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
        self.layers = nn.ModuleDict(
            {
                str(i): StyledLayer(
                    config, style, self.dropout_rng, "", f"layers.{i}", causal=False
                )
                for i in layer_numbers("layers", config.n_layers)
            }
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
            tokens_BS: Tokens [b, s].
            segments_BS: 0 for tokens of sentence A, 1 for sentence B [b, s]; None means all 0.
            valid_BS: False where a token is padding [b, s]; None means there is no padding.
        """
        batch = {"tokens": tokens_BS}
        if segments_BS is not None:
            batch["segments"] = segments_BS
        if valid_BS is not None:
            batch["valid"] = valid_BS
        return self.token_logits(self.hidden(batch))

    def run(
        self,
        batch: Batch,
        entering: Activations | None = None,
        links: Collection[str] | None = None,
        caches: Sequence[KVCache] | None = None,
        start: int = 0,
    ) -> Activations:
        assert not caches, "an encoder sees all tokens at once"
        hidden, _ = Activations.taken(entering)
        links = self._link_names() if links is None else links
        tokens_BS = batch["tokens"]
        s = tokens_BS.shape[1]

        if "embedding" in links:
            segments_BS = batch.get("segments", torch.zeros_like(tokens_BS))
            hidden = self.tokens(tokens_BS) + self.positions(s, 0) + self.segments(segments_BS)
            if self.post:
                hidden = self.embedding_norm(hidden)
            hidden = self.dropout(self._cast(hidden))

        layers = self._layers(self.layers, "layers", links)
        mask = None
        if layers and "valid" in batch:
            mask = added_to_scores(s, hidden.dtype, self.mask(batch["valid"]), fused=self.fused)
        for _, layer in layers:
            hidden = self.recompute.block(layer, hidden, mask)

        if "head" in links and not self.post:
            hidden = self.norm(hidden)
        return Activations(hidden)

    def token_logits(
        self, hidden_BSH: Tensor, table: Tensor | None = None, padded: bool = False
    ) -> Tensor:
        x = self.head_norm(self.gelu(self.transform(hidden_BSH)))
        return self._head_logits(x, table, padded)

    def branch_logits(self, hidden_BSH: Tensor, batch: Batch) -> dict[str, Tensor]:
        logits = self._branch_logits(hidden_BSH, batch)
        if "pair" in batch:
            logits["pair"] = self.pair(hidden_BSH, torch.zeros_like(batch["pair"]))
        return logits

    def head_modules(self) -> tuple[nn.Module, ...]:
        return self.transform, self.gelu, self.head_norm, self.head

    def links(self) -> list[Link]:
        first = ("tokens", "positions", "segments", "dropout") + ("embedding_norm",) * self.post
        config = self.config
        words = ("transform", "head_norm", "head", "tokens") if config.token_head else ("head",)
        last = (*("norm",) * (not self.post), *words, "loss")
        branches = ("pair",) * config.sentence_pair + self._branch_modules()
        return [
            Link("embedding", first),
            *(Link(f"layers.{i}", (f"layers.{i}", "mask")) for i in range(self.config.n_layers)),
            Link("head", last + branches),
        ]
