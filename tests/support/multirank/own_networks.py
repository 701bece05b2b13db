"""Functions that return networks, as run files name them, and the values of `model` for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from examples import own_model
from gridformer.config import ModelConfig
from gridformer.models.network import NetworkLayer
from gridformer.prove import in_float64
from tests.support.marks import extra

H, HEADS, WORDS = 24, 4, 301  # no number of devices divides the words
SIZES = {"vocab_size": WORDS, "hidden_size": H, "num_hidden_layers": 3, "pad_token_id": 0}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": 2, "intermediate_size": 2 * H}


class Scaled(own_model.Decoder):
    """Code of its own reads whole logits and a buffer, and the head does not share its table."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(n_layers=3, h=H, n_heads=HEADS)
        self.words, self.head = nn.Embedding(WORDS, H), nn.Linear(H, WORDS, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WORDS), persistent=False)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(tokens, position_ids) * self.scale


def planned(kind: Callable[[], nn.Module]) -> tuple[nn.Module, None, dict[str, str]]:
    return kind(), None, own_model.PLAN


scaled = partial(planned, Scaled)
deep = partial(planned, partial(own_model.Decoder, n_layers=10, h=48, n_heads=12))


def llama() -> nn.Module:
    transformers = extra("transformers")
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def mixtral() -> nn.Module:
    transformers = extra("transformers")
    config = transformers.MixtralConfig(**SIZES, num_local_experts=3, sliding_window=5)
    model: nn.Module = transformers.MixtralForCausalLM(config)
    return model


NETWORKS = ("examples.own_model:network", "scaled", "llama", "mixtral")


def in_double(compare: Callable[..., dict[str, float]], *args: Any) -> dict[str, float]:
    """Call a function while layers of networks, also recomputed ones, do not cast to float32."""
    call = NetworkLayer.__call__

    def wide(*args: Any, **kwargs: Any) -> Any:
        with in_float64():
            return call(*args, **kwargs)

    with patch.object(NetworkLayer, "__call__", wide):
        return compare(*args)


def of(name: str, **changes: Any) -> dict[str, Any]:
    """Return all values of `model` for a function, of this module if it is a mere word."""
    factory = name if ":" in name else f"{__name__}:{name}"
    return {**ModelConfig.model_validate({"factory": factory}).model_dump(), **changes}
