"""The original Transformer (Vaswani et al. 2017): two stacks, post-LayerNorm, sinusoids."""

from __future__ import annotations

import math

from torch import Tensor

from gridformer.config import ModelConfig
from gridformer.models.blocks import SinusoidalPositions, Spread, Style
from gridformer.models.encoder_decoder import EncoderDecoder


class Transformer(EncoderDecoder):
    """One table embeds source and target, times h^1/2, and is the head's (section 3.4).

    Matrices start as Glorot and Bengio 2010 have them, normal: std = (2 / (in + out))^1/2.
    """

    position_modules = ("positions",)

    def __init__(self, config: ModelConfig) -> None:
        h, f, inner = config.hidden_size, config.ffn_size, config.n_heads * config.head_width
        attention, feed_forward = math.sqrt(2 / (h + inner)), math.sqrt(2 / (h + f))
        spread = Spread(*[attention] * 4, *[feed_forward] * 2)
        super().__init__(config, Style(spread, "relu"), embedding_std=h**-0.5)
        self.positions = SinusoidalPositions(h)

    def embed(self, tokens_BS: Tensor, start: int) -> Tensor:
        x: Tensor = self.tokens(tokens_BS) * math.sqrt(self.config.hidden_size)
        positions: Tensor = self.positions(tokens_BS.shape[1], start, x)
        return x + positions
