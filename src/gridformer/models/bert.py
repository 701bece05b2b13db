"""BERT (Devlin et al. 2019): an encoder that fills in masked words and tells sentence pairs.

With `norm_position: post`, as published, LayerNorm follows each residual. With `pre` it stands at
the input of each sub-layer and once at the end, which Megatron needed to train beyond 336M
parameters (Shoeybi et al. 2019, section 5.3).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from gridformer.batch import Batch
from gridformer.config import ModelConfig
from gridformer.models.blocks import (
    Classifier,
    Dropout,
    Init,
    Layer,
    LayerNorm,
    Linear,
    PaddingMask,
    PositionEmbedding,
    Role,
    SegmentEmbedding,
    Spread,
    Style,
    TiedHead,
    TokenEmbedding,
)
from gridformer.models.model import Link, Model, State


class BERT(Model):
    """Tokens [b, s] to logits [b, s, v], and of the branches: whether sentence B follows A, read
    from the first token ([CLS]); a label, read from a chosen token."""

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
        self.dropout = Dropout(config.dropout, "embedding", self.clock)
        self.mask = PaddingMask()
        self.layers = nn.ModuleDict(
            {
                str(i): Layer(config, style, self.clock, "", f"layers.{i}", causal=False)
                for i in range(config.n_layers)
            }
        )
        if not self.post:
            self.norm = LayerNorm(h, config.norm_eps)
        self.transform = Linear(h, h, Role("transform", "head"), Init(std=std))
        self.gelu = nn.GELU()
        self.head_norm = LayerNorm(h, config.norm_eps, "head")
        self.head = TiedHead(biases=v)
        if config.sentence_pair:
            self.pair = Classifier(h, 2, std)
        if config.n_labels:
            self.classifier = Classifier(h, config.n_labels, std)

    def links(self) -> list[Link]:
        first = ("tokens", "positions", "segments", "dropout") + ("embedding_norm",) * self.post
        last = ("norm",) * (not self.post) + ("transform", "head_norm", "head", "tokens", "loss")
        branches = ("pair",) * self.config.sentence_pair + ("classifier",) * bool(
            self.config.n_labels
        )
        return [
            Link("embedding", self._embed, first),
            *(
                Link(f"layers.{i}", partial(self._layer, i), (f"layers.{i}", "mask"))
                for i in range(self.config.n_layers)
            ),
            Link("head", self._finish, last + branches),
        ]

    def forward(
        self,
        tokens_BS: Tensor,
        segments_BS: Tensor | None = None,
        valid_BS: Tensor | None = None,
    ) -> Tensor:
        """Logits of every place; valid: which tokens are no padding."""
        batch = {"tokens": tokens_BS}
        if segments_BS is not None:
            batch["segments"] = segments_BS
        if valid_BS is not None:
            batch["valid"] = valid_BS
        return self.outputs(batch)["tokens"]

    def _embed(self, state: State, batch: Batch) -> None:
        tokens = batch["tokens"]
        segments = batch.get("segments", torch.zeros_like(tokens))
        x = self.tokens(tokens) + self.positions(tokens.shape[1], 0) + self.segments(segments)
        if self.post:
            x = self.embedding_norm(x)
        state.x = self.dropout(self._cast(x))

    def _layer(self, i: int, state: State, batch: Batch) -> None:
        mask = self._mask(state, batch, self.mask)
        state.x = self.recompute.block(self.layers[str(i)], state.hidden, mask)

    def _finish(self, state: State, batch: Batch) -> None:
        x = state.hidden if self.post else self.norm(state.hidden)
        self._predict(state, x)
        if "pair" in batch:
            first = torch.zeros_like(batch["pair"])
            state.outputs["pair"] = self.pair(x, first)
        if "at" in batch:
            state.outputs["labels"] = self.classifier(x, batch["at"])

    def _before_head(self) -> tuple[nn.Module, ...]:
        return (self.transform, self.gelu, self.head_norm)
