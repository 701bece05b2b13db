"""T5 (Raffel et al. 2020): encoder and decoder, RMSNorm, relative positions, no biases, ReLU."""

from __future__ import annotations

from torch import Tensor

from gridformer.config import ModelConfig
from gridformer.models.blocks import Spread, Style
from gridformer.models.encoder_decoder import EncoderDecoder


class T5(EncoderDecoder):
    """T5 as first released.

    Attention scores are not scaled; the query matrices are initialized with a smaller std instead.
    The head shares the embedding's table and multiplies its input by h^-1/2. The heads of
    fine-tuning do not.
    """

    def __init__(self, config: ModelConfig) -> None:
        h, f = config.hidden_size, config.ffn_size
        d, inner = config.head_width, config.n_heads * config.head_width
        spread = Spread((h * d) ** -0.5, h**-0.5, h**-0.5, inner**-0.5, h**-0.5, f**-0.5)
        style = Style(spread, "relu", norm="rms", bias=False, scaled=False)
        head_scale = h**-0.5 if config.token_head else 1.0
        super().__init__(config, style, embedding_std=1.0, head_scale=head_scale)

    def embed(self, tokens_BS: Tensor, start: int, positions: Tensor | None = None) -> Tensor:
        x: Tensor = self.tokens(tokens_BS)
        return x
