"""Plain single-device models, without distributed code.

Schemes, pipelines and memory methods change them at a few seams, which docs/architecture.md lists.
"""

import torch

from gridformer.config import Family, ModelConfig
from gridformer.models.bert import BERT
from gridformer.models.encoder_decoder import EncoderDecoder
from gridformer.models.gpt2 import GPT2
from gridformer.models.llama import Llama
from gridformer.models.model import LOSSES, Activations, Link, Model
from gridformer.models.t5 import T5
from gridformer.models.transformer import Transformer

__all__ = [
    "BERT",
    "FAMILIES",
    "GPT2",
    "LOSSES",
    "T5",
    "Activations",
    "EncoderDecoder",
    "Link",
    "Llama",
    "Model",
    "Transformer",
    "build_model",
    "count_parameters",
]

FAMILIES: dict[Family, type[Model]] = {
    "gpt2": GPT2,
    "bert": BERT,
    "t5": T5,
    "transformer": Transformer,
    "llama": Llama,
}


def build_model(config: ModelConfig) -> Model:
    """Builds the model that a config describes, with uninitialized parameters.

    Build it under `torch.device("meta")` and pass it to `gridformer.parallel.parallelize`, which
    shards, allocates and initializes it.

    Raises:
        ValueError: `config.vocab_size` is not known yet.
    """
    return FAMILIES[config.family](config)


def count_parameters(config: ModelConfig) -> int:
    """Returns the number of parameter elements of a model, counting shared parameters once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(config).parameters())
