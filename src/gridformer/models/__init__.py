"""Plain single-device models; there is no distributed code in this package."""

import torch

from gridformer.config import Family, ModelConfig
from gridformer.models.bert import BERT
from gridformer.models.encoder_decoder import EncoderDecoder
from gridformer.models.gpt2 import GPT2
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
}


def build_model(config: ModelConfig) -> Model:
    """The model that a config describes, unfilled; see `gridformer.parallel.parallelize`."""
    return FAMILIES[config.family](config)


def count_parameters(config: ModelConfig) -> int:
    """Elements of all parameters of a model, shared ones once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(config).parameters())
