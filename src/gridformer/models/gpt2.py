"""GPT-2 (Radford et al. 2019): decoder, pre-LayerNorm, learned positions, tied embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from gridformer.batch import Batch
from gridformer.config import ModelConfig
from gridformer.models.blocks import (
    Classifier,
    Dropout,
    KVCache,
    Layer,
    LayerNorm,
    PaddingMask,
    PositionEmbedding,
    Spread,
    Style,
    TiedHead,
    TokenEmbedding,
)
from gridformer.models.model import Link, Model, State


class GPT2(Model):
    """Tokens [b, s] to logits [b, s, v], and of a classification branch where there is one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        h, std, n = config.hidden_size, config.init_std, config.n_layers
        # The two projections into the residual stream start smaller, so that the variance of the
        # sum over all layers does not grow with depth (Radford et al. 2019, section 2.3).
        std_out = std / math.sqrt(2 * n)
        style = Style(Spread(std, std, std, std_out, std, std_out), "gelu_tanh")
        self.tokens = TokenEmbedding(config.vocab_size, h, std)
        self.positions = PositionEmbedding(config.max_seq_len, h, std)
        self.dropout = Dropout(config.dropout, "embedding", self.clock)
        self.mask = PaddingMask()
        # A ModuleDict, so that names stay the same where a device holds some of the layers only.
        self.layers = nn.ModuleDict(
            {
                str(i): Layer(config, style, self.clock, "", f"layers.{i}", causal=True)
                for i in range(n)
            }
        )
        self.norm = LayerNorm(h, config.norm_eps, None if config.n_labels else "head")
        self.head = TiedHead()
        if config.n_labels:
            self.classifier = Classifier(h, config.n_labels, std)

    def links(self) -> list[Link]:
        holds = ("norm", "head", "tokens", "loss") + ("classifier",) * bool(self.config.n_labels)
        return [
            Link("embedding", self._embed, ("tokens", "positions", "dropout")),
            *(
                Link(f"layers.{i}", partial(self._layer, i), (f"layers.{i}", "mask"))
                for i in range(self.config.n_layers)
            ),
            Link("head", self._finish, holds),
        ]

    def forward(
        self, tokens_BS: Tensor, caches: Sequence[KVCache] | None = None, start: int = 0
    ) -> Tensor:
        """Logits; with `caches` (one a layer) `tokens_BS` continue at position `start`."""
        return self.outputs({"tokens": tokens_BS}, caches, start)["tokens"]

    def label_logits(self, tokens_BS: Tensor, at_B: Tensor) -> Tensor:
        """The classification branch alone: a label for each sequence, from its token at `at_B`."""
        return self.outputs({"tokens": tokens_BS, "at": at_B})["labels"]

    def _embed(self, state: State, batch: Batch) -> None:
        tokens = batch["tokens"]
        x = self.tokens(tokens) + self.positions(tokens.shape[1], state.start)
        state.x = self.dropout(self._cast(x))

    def _layer(self, i: int, state: State, batch: Batch) -> None:
        mask = self._mask(state, batch, self.mask, causal=True)
        cache = state.caches[i] if state.caches else None
        layer = self.layers[str(i)]
        state.x = self.recompute.block(layer, state.hidden, mask, None, None, cache)

    def _finish(self, state: State, batch: Batch) -> None:
        self._predict(state, state.hidden)
        if "at" in batch:
            state.outputs["labels"] = self.classifier(self.norm(state.hidden), batch["at"])

    def _before_head(self) -> tuple[nn.Module, ...]:
        return (self.norm,)
