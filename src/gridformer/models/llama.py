"""Llama-like models: decoder, pre-RMSNorm, rotary positions, grouped queries, gated feed-forward.

The same family describes Llama (Touvron et al. 2023; Meta 2024), Mistral (Jiang et al. 2023: a
sliding window), Qwen2 (Yang et al. 2024: biases of q, k and v) and Qwen3 (Yang et al. 2025: norms
of each head's queries and keys).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn

from gridformer.config import ModelConfig
from gridformer.models.blocks import (
    AttendingRows,
    Dropout,
    GatedLayer,
    KVCache,
    PaddingMask,
    RMSNorm,
    RotaryPositions,
    TiedHead,
    TokenEmbedding,
    UntiedHead,
    Window,
    added_to_scores,
    document_bounds,
)
from gridformer.models.held_layers import layer_numbers
from gridformer.models.model import Activations, Link, Model
from gridformer.utils.batch import Batch


class Llama(Model):
    """Maps tokens [b, s] to logits [b, s, v], and to the logits of optional branches.

    The branch `labels` classifies one chosen token of each sequence: [b, n_labels]. The branch
    `answer` tells where an answer begins and ends: [b, 2, s].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        h, v, std = config.hidden_size, config.vocab_size, config.init_std
        self.tokens = TokenEmbedding(v, h, std)
        self.dropout = Dropout(config.dropout, "embedding", self.dropout_rng)
        self.mask, self.rows = PaddingMask(), AttendingRows()
        self.rotary = RotaryPositions(config.head_width, config.rope_theta, config.rope_scaling)
        # A ModuleDict keeps parameter names the same on a device that holds only some layers.
        self.layers = nn.ModuleDict(
            {
                str(i): GatedLayer(config, self.dropout_rng, f"layers.{i}")
                for i in layer_numbers("layers", config.n_layers)
            }
        )
        self.norm = RMSNorm(h, config.norm_eps, "head" if config.only_token_head else None)
        tied = config.tied_head or not config.token_head  # which has no weights of its own
        self.head = TiedHead() if tied else UntiedHead(v, h, std)
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
        s, window = tokens_BS.shape[1], self.config.window

        if "embedding" in links:
            hidden = self.dropout(self._cast(self.tokens(tokens_BS)))

        layers = self._layers(self.layers, "layers", links)
        rotation = mask = None
        if layers:
            device, dtype = tokens_BS.device, hidden.dtype
            places = self.rows(batch["positions"]) if "positions" in batch else None
            rotation = self.rotary(s, start, device, dtype, places)
            # Needed for padding, documents and windows only: attention is causal without a mask.
            keys = s + (min(start, window - 1) if caches else 0)  # of past tokens, and new ones
            near = Window(window, keys, device) if window else None
            valid = bounds = None
            if "documents" in batch:  # padding has a number of its own
                bounds = document_bounds(self.rows(batch["documents"]))
            elif "valid" in batch:
                valid = self.mask(batch["valid"])
            fused = self.fused and not caches
            mask = added_to_scores(s, dtype, valid, None, True, fused, near, bounds)
        for i, layer in layers:
            cache = caches[i] if caches else None
            hidden = self.recompute.block(layer, hidden, rotation, mask, cache)

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
        config = self.config
        tied = ("tokens",) * (config.tied_head and config.token_head)
        layers = (f"layers.{i}" for i in range(config.n_layers))
        return [
            Link("embedding", ("tokens", "dropout")),
            *(Link(name, (name, "mask", "rows", "rotary")) for name in layers),
            Link("head", ("norm", "head", *tied, "loss", *self._branch_modules())),
        ]
