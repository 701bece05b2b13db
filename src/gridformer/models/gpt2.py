"""GPT-2 (Radford et al. 2019): decoder, pre-LayerNorm, learned positions, tied embedding."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from torch import Tensor, nn

from gridformer.config import ModelConfig
from gridformer.models.blocks import (
    AttendingRows,
    Dropout,
    KVCache,
    LayerNorm,
    PaddingMask,
    PositionEmbedding,
    Spread,
    Style,
    StyledLayer,
    TiedHead,
    TokenEmbedding,
    added_to_scores,
    document_bounds,
)
from gridformer.models.held_layers import layer_numbers
from gridformer.models.model import Activations, Link, Model
from gridformer.utils.batch import Batch


class GPT2(Model):
    """Maps tokens [b, s] to logits [b, s, v], and to the logits of optional branches.

    The branch `labels` classifies one chosen token of each sequence: [b, n_labels]. The branch
    `answer` tells where an answer begins and ends: [b, 2, s].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        h, std, n = config.hidden_size, config.init_std, config.n_layers
        # The two projections into the residual stream are initialized with a smaller std, so that
        # the variance of the residual stream does not grow with depth (Radford et al. 2019,
        # section 2.3).
        std_out = std / math.sqrt(2 * n)
        style = Style(Spread(std, std, std, std_out, std, std_out), "gelu_tanh")
        self.tokens = TokenEmbedding(config.vocab_size, h, std)
        self.positions = PositionEmbedding(config.max_seq_len, h, std)
        self.dropout = Dropout(config.dropout, "embedding", self.dropout_rng)
        self.mask, self.rows = PaddingMask(), AttendingRows()
        # A ModuleDict keeps parameter names the same on a device that holds only some layers.
        self.layers = nn.ModuleDict(
            {
                str(i): StyledLayer(config, style, self.dropout_rng, "", f"layers.{i}", causal=True)
                for i in layer_numbers("layers", n)
            }
        )
        self.norm = LayerNorm(h, config.norm_eps, "head" if config.only_token_head else None)
        self.head = TiedHead()
        self._add_heads(std)

    def forward(
        self, tokens_BS: Tensor, caches: Sequence[KVCache] | None = None, start: int = 0
    ) -> Tensor:
        """Computes logits [b, s, v].

        Args:
            tokens_BS: Tokens [b, s].
            caches: For generation, one cache per layer, which the tokens continue.
            start: The position of the first token.
        """
        return self.token_logits(self.hidden({"tokens": tokens_BS}, caches, start))

    def run(
        self,
        batch: Batch,
        entering: Activations | None = None,
        links: Collection[str] | None = None,
        caches: Sequence[KVCache] | None = None,
        start: int = 0,
    ) -> Activations:
        hidden, _ = Activations.taken(entering)
        links = self._link_names() if links is None else links
        tokens_BS = batch["tokens"]
        s = tokens_BS.shape[1]

        if "embedding" in links:
            hidden = self.tokens(tokens_BS)
            hidden = hidden + self.positions(s, start, batch.get("positions"))
            hidden = self.dropout(self._cast(hidden))

        layers = self._layers(self.layers, "layers", links)
        mask = None  # needed for padding and documents only: attention is causal without one
        fused = self.fused and not caches
        if layers and "documents" in batch:  # padding has a number of its own
            bounds = document_bounds(self.rows(batch["documents"]))
            mask = added_to_scores(s, hidden.dtype, causal=True, fused=fused, documents=bounds)
        elif layers and "valid" in batch:
            valid = self.mask(batch["valid"])
            mask = added_to_scores(s, hidden.dtype, valid, causal=True, fused=fused)
        for i, layer in layers:
            cache = caches[i] if caches else None
            hidden = self.recompute.block(layer, hidden, mask, cache)

        return Activations(hidden)

    # The last norm is part of the logits, so that a chunked loss runs it on one chunk at a time.

    def token_logits(
        self, hidden_BSH: Tensor, table: Tensor | None = None, padded: bool = False
    ) -> Tensor:
        return self._head_logits(self.norm(hidden_BSH), table, padded)

    def branch_logits(self, hidden_BSH: Tensor, batch: Batch) -> dict[str, Tensor]:
        return self._branch_logits(hidden_BSH, batch, self.norm)

    def head_modules(self) -> tuple[nn.Module, ...]:
        return self.norm, self.head

    def links(self) -> list[Link]:
        tied = ("tokens",) * self.config.token_head
        head = ("norm", "head", *tied, "loss", *self._branch_modules())
        return [
            Link("embedding", ("tokens", "positions", "dropout")),
            *(
                Link(f"layers.{i}", (f"layers.{i}", "mask", "rows"))
                for i in range(self.config.n_layers)
            ),
            Link("head", head),
        ]
