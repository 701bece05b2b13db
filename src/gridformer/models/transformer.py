"""The original Transformer (Vaswani et al. 2017): encoder-decoder, post-LayerNorm, sinusoids."""

from __future__ import annotations

import math

from torch import Tensor

from gridformer.config import ModelConfig
from gridformer.models.blocks import SinusoidalPositions, Spread, Style
from gridformer.models.encoder_decoder import EncoderDecoder


class Transformer(EncoderDecoder):
    """One table, scaled by h^1/2, embeds source and target; the head shares it (section 3.4).

    Matrices are initialized from a normal distribution with std = (2 / (in + out))^1/2 (Glorot and
    Bengio 2010).
    """

    position_modules = ("positions",)

    def __init__(self, config: ModelConfig) -> None:
        h, f, inner = config.hidden_size, config.ffn_size, config.n_heads * config.head_width
        attention, feed_forward = math.sqrt(2 / (h + inner)), math.sqrt(2 / (h + f))
        spread = Spread(*[attention] * 4, *[feed_forward] * 2)
        super().__init__(config, Style(spread, "relu"), embedding_std=h**-0.5)
        self.positions = SinusoidalPositions(h)

    def embed(self, tokens_BS: Tensor, start: int, positions: Tensor | None = None) -> Tensor:
        x: Tensor = self.tokens(tokens_BS) * math.sqrt(self.config.hidden_size)
        waves: Tensor = self.positions(tokens_BS.shape[1], start, x, positions)
        return x + waves
