"""All kinds of models that are converted, by the `model_type` of Hugging Face's config.json."""

from __future__ import annotations

from gridformer.checkpoint.convert.bert import BERT
from gridformer.checkpoint.convert.gpt2 import GPT2
from gridformer.checkpoint.convert.llama import LLAMA_KINDS
from gridformer.checkpoint.convert.t5 import T5
from gridformer.checkpoint.convert.table import Kind, TableEntry
from gridformer.config import ModelConfig

KINDS: dict[str, Kind] = {kind.model_type: kind for kind in (GPT2, BERT, T5, *LLAMA_KINDS)}


def kinds_of(config: ModelConfig) -> list[Kind]:
    """Returns the kinds of a family."""
    return [kind for kind in KINDS.values() if kind.family == config.family]


def entries_of(config: ModelConfig) -> list[TableEntry]:
    """Returns the table of a model. It is the same for all kinds of its family."""
    return kinds_of(config)[0].entries(config)
