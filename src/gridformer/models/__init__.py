"""Plain single-device models; there is no distributed code in this package."""

from gridformer.config import ModelConfig
from gridformer.models.gpt2 import GPT2

__all__ = ["GPT2", "build_model"]


def build_model(config: ModelConfig) -> GPT2:
    """The model that a config describes, unfilled; see `gridformer.parallel.parallelize`."""
    return {"gpt2": GPT2}[config.family](config)
