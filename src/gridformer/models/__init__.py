# ruff: noqa: F401
"""Plain single-device models, without distributed code.

Schemes, pipelines and memory methods change them at a few places; docs/reference/internals.md
lists these.
"""

import torch

from gridformer.config import Family, ModelConfig
from gridformer.models.bert import BERT
from gridformer.models.decoder import GPT2, Llama
from gridformer.models.encoder_decoder import T5, EncoderDecoder, Transformer
from gridformer.models.model import LOSSES, Activations, Link, Model
from gridformer.models.network import NetworkModel
from gridformer.utils.units import format_count

FAMILIES: dict[Family, type[Model]] = {
    "gpt2": GPT2,
    "bert": BERT,
    "t5": T5,
    "transformer": Transformer,
    "llama": Llama,
    "network": NetworkModel,
}


def build_model(config: ModelConfig) -> Model:
    """Builds the model that a config describes, with uninitialized parameters.

    Build it under `torch.device("meta")` and pass it to `gridformer.parallel.parallelize`.

    Raises:
        ValueError: `config.vocab_size` is not known yet.
    """
    return FAMILIES[config.family](config)


def in_few_layers(config: ModelConfig) -> list[tuple[int, ModelConfig]]:
    """Returns models of few layers, and how often to take each so that they add up to a deep model.

    Totals of a model, such as its number of parameters, are sums over its layers, which are equal
    except perhaps for the first and the last one: two and three layers tell what each further adds,
    besides those without experts.
    One of the factors is negative. Layers of other networks may differ, so theirs are all taken.
    """
    if config.family == "network":
        return [(1, config)]
    few = 2 + config.dense_layers  # which come first
    deep = [name for name in ("n_layers", "n_decoder_layers") if getattr(config, name) > few]
    base = config.model_copy(update=dict.fromkeys(deep, few))
    more = [(getattr(config, name) - few, base.model_copy(update={name: few + 1})) for name in deep]
    return [(1 - sum(times for times, _ in more), base), *more]


def count_parameters(config: ModelConfig) -> int:
    """Returns the number of parameter elements of a model, counting shared parameters once."""
    total = 0
    with torch.device("meta"):
        for times, model in in_few_layers(config):
            total += times * sum(parameter.numel() for parameter in build_model(model).parameters())
    return total


def describe_parameters(config: ModelConfig) -> str:
    """Returns `7.24B parameters`, or with experts `46.7B parameters, 12.9B for each token`."""
    total = count_parameters(config)
    text = f"{format_count(total)} parameters"
    if not config.n_experts:
        return text
    others = (config.n_layers - config.dense_layers) * (config.n_experts - config.experts_per_token)
    active = total - others * 3 * config.hidden_size * config.expert_size
    return f"{text}, {format_count(active)} for each token"
