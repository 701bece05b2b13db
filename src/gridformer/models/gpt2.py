"""GPT-2 (Radford et al. 2019): decoder, pre-LayerNorm, learned positions, tied embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gridformer.config import ModelConfig
from gridformer.models.blocks import (
    Attention,
    Classifier,
    CrossEntropy,
    Dropout,
    DropoutClock,
    FeedForward,
    KVCache,
    LayerNorm,
    PositionEmbedding,
    TiedHead,
    TokenEmbedding,
)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)). [b, s, h] to [b, s, h]."""

    def __init__(self, config: ModelConfig, index: int, clock: DropoutClock) -> None:
        super().__init__()
        h, std = config.hidden_size, config.init_std
        # The two projections into the residual stream start smaller, so that the variance of the
        # sum over all layers does not grow with depth (Radford et al. 2019, section 2.3).
        std_out = std / math.sqrt(2 * config.n_layers)
        site = f"layers.{index}"
        self.norm1 = LayerNorm(h, config.norm_eps, opens=True)
        self.attention = Attention(
            h, config.n_heads, config.attention_dropout, f"{site}.attention", clock, std, std_out
        )
        self.dropout1 = Dropout(config.dropout, f"{site}.dropout1", clock)
        self.norm2 = LayerNorm(h, config.norm_eps, opens=True)
        self.mlp = FeedForward(h, config.ffn_size, std, std_out)
        self.dropout2 = Dropout(config.dropout, f"{site}.dropout2", clock)

    def forward(self, x_BSH: Tensor, cache: KVCache | None = None) -> Tensor:
        x_BSH = x_BSH + self.dropout1(self.attention(self.norm1(x_BSH), cache))
        return x_BSH + self.dropout2(self.mlp(self.norm2(x_BSH)))


class GPT2(nn.Module):
    """Tokens [b, s] to logits [b, s, v].

    Build it on torch's meta device and hand it to `gridformer.parallel.parallelize`, which cuts
    it, allocates what this device holds and fills it. `compute_dtype` is the activations'.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ValueError("vocab_size must be known before a model is built")
        h, std = config.hidden_size, config.init_std
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.clock = DropoutClock()
        self.tokens = TokenEmbedding(config.vocab_size, h, std)
        self.positions = PositionEmbedding(config.max_seq_len, h, std)
        self.dropout = Dropout(config.dropout, "embedding", self.clock)
        # A ModuleDict, so that names stay the same where a device holds some of the layers only.
        self.layers = nn.ModuleDict(
            {str(i): Block(config, i, self.clock) for i in range(config.n_layers)}
        )
        self.norm = LayerNorm(h, config.norm_eps, opens=not config.n_labels)
        self.head = TiedHead()
        self.loss = CrossEntropy()
        if config.n_labels:
            self.classifier = Classifier(h, config.n_labels, std)

    def forward(
        self, tokens_BS: Tensor, caches: list[KVCache] | None = None, start: int = 0
    ) -> Tensor:
        """Logits; with `caches` (one a layer) `tokens_BS` continue at position `start`."""
        return self.head(self.hidden(tokens_BS, caches, start), self.tokens.weight)

    def hidden(
        self, tokens_BS: Tensor, caches: list[KVCache] | None = None, start: int = 0
    ) -> Tensor:
        """What the head and the classification branch read: [b, s, h] after the last norm."""
        x_BSH = self.tokens(tokens_BS) + self.positions(tokens_BS.shape[1], start)
        x_BSH = self.dropout(x_BSH.to(self.compute_dtype or x_BSH.dtype))
        for i, layer in enumerate(self.layers.values()):
            x_BSH = layer(x_BSH, caches[i] if caches else None)
        return self.norm(x_BSH)

    def loss_sum(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Cross entropy summed over this device's targets."""
        return self.loss(self(tokens_BS), targets_BS)

    def label_logits(self, tokens_BS: Tensor, at_B: Tensor) -> Tensor:
        """The classification branch: a label for each sequence, from its token at `at_B`."""
        return self.classifier(self.hidden(tokens_BS), at_B)
