"""BERT's table: matrix products are torch.nn.Linear, and q, k and v are separate ones."""

from __future__ import annotations

from typing import Any

from gridformer.checkpoint.convert.config_keys import ConfigKeys
from gridformer.checkpoint.convert.forms import REVERSED, SAME, TRANSPOSED, Form, Interleaved
from gridformer.checkpoint.convert.heads import head_entries, head_keys, read_heads
from gridformer.checkpoint.convert.table import Kind, TableEntry
from gridformer.config import ModelConfig, Task

_LABELS = {"classifier.pooler": "bert.pooler.dense", "classifier.labels": "classifier"}
_NEXT_SENTENCE = "cls.seq_relationship.weight"


def entries(config: ModelConfig) -> list[TableEntry]:
    """Returns the table of a BERT: how each of our parameters is stored there."""
    found = [
        TableEntry("tokens.weight", ("bert.embeddings.word_embeddings.weight",)),
        TableEntry("positions.weight", ("bert.embeddings.position_embeddings.weight",)),
        TableEntry("segments.weight", ("bert.embeddings.token_type_embeddings.weight",)),
        *_norm("embedding_norm", "bert.embeddings.LayerNorm"),
    ]
    qkv = Interleaved(3, config.head_width)
    for i in range(config.n_layers):
        here, there = f"layers.{i}", f"bert.encoder.layer.{i}"
        parts = [f"{there}.attention.self.{part}" for part in ("query", "key", "value")]
        found += [
            *_linear(f"{here}.attention.qkv", parts, qkv, qkv),
            *_linear(f"{here}.attention.out", [f"{there}.attention.output.dense"]),
            *_norm(f"{here}.norm1", f"{there}.attention.output.LayerNorm"),
            *_linear(f"{here}.mlp.up", [f"{there}.intermediate.dense"]),
            *_linear(f"{here}.mlp.down", [f"{there}.output.dense"]),
            *_norm(f"{here}.norm2", f"{there}.output.LayerNorm"),
        ]
    if config.token_head:
        found += [
            *_linear("transform", ["cls.predictions.transform.dense"]),
            *_norm("head_norm", "cls.predictions.transform.LayerNorm"),
            TableEntry("head.bias", ("cls.predictions.bias",)),
        ]
    found += head_entries(config, _LABELS)
    if config.sentence_pair:
        found += [
            *_linear("pair.pooler", ["bert.pooler.dense"]),
            # Their label 0 means that sentence B follows A; here it is 1.
            *_linear("pair.labels", ["cls.seq_relationship"], REVERSED, REVERSED),
        ]
    return found


def _linear(
    ours: str, theirs: list[str], weight: Form = TRANSPOSED, bias: Form = SAME
) -> list[TableEntry]:
    return [
        TableEntry(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), weight),
        TableEntry(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), bias),
    ]


def _norm(ours: str, theirs: str) -> list[TableEntry]:
    return _linear(ours, [theirs], SAME)


def read_config(keys: ConfigKeys, names: frozenset[str]) -> dict[str, Any]:
    """Returns the keys of our ModelConfig for a BERT.

    A value that our family does not have becomes one of `keys.problems`.

    Args:
        keys: The keys of their config.json.
        names: The names of the stored tensors, which tell what heads there are.
    """
    keys.only("hidden_act", ("gelu",), "gelu")
    keys.only("position_embedding_type", ("absolute", None), "absolute")
    keys.only("type_vocab_size", (2,), 2)
    keys.only("is_decoder", (False,), False)
    keys.only("add_cross_attention", (False,), False)
    keys.only("tie_word_embeddings", (True,), True)
    return _heads_of(keys, names) | {
        "n_layers": keys.size("num_hidden_layers"),
        "hidden_size": keys.size("hidden_size"),
        "n_heads": keys.size("num_attention_heads"),
        "ffn_size": keys.size("intermediate_size"),
        "vocab_size": keys.size("vocab_size"),
        "max_seq_len": keys.size("max_position_embeddings"),
        "dropout": keys.get("hidden_dropout_prob", 0.1),
        "attention_dropout": keys.get("attention_probs_dropout_prob", 0.1),
        "norm_eps": keys.get("layer_norm_eps", 1e-12),
        "init_std": keys.get("initializer_range", 0.02),
    }


def _heads_of(keys: ConfigKeys, names: frozenset[str]) -> dict[str, Any]:
    """Returns the keys of our ModelConfig for the heads, found by the names of their tensors."""
    heads = read_heads(keys, names, "classifier.weight")
    return {"sentence_pair": not heads and _NEXT_SENTENCE in names} | heads


def write_config(config: ModelConfig, task: Task = "auto") -> dict[str, Any] | list[str]:
    """Returns the keys of their config.json for a BERT, or why there is none.

    Args:
        config: Our model.
        task: What the model has learned.

    Returns:
        The keys, or a list of problems if their class cannot represent the model.
    """
    problems: list[str] = []
    if config.norm_position != "post":
        problems.append(f"norm_position={config.norm_position}: transformers' BERT has only post")
    if config.head_width * config.n_heads != config.hidden_size:
        problems.append(
            f"head_dim={config.head_dim}: in transformers it is hidden_size / n_heads, "
            f"{config.hidden_size // config.n_heads}"
        )
    pretrained = "BertForPreTraining" if config.sentence_pair else "BertForMaskedLM"
    return problems or {
        **head_keys(config, task, "Bert", pretrained),
        "num_hidden_layers": config.n_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.ffn_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "layer_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
    }


BERT = Kind(
    "bert",
    "bert",
    entries,
    read_config,
    write_config,
    prefix="bert.",
    skipped=(r"bert\.embeddings\.(position_ids|token_type_ids)",),
    repeats={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    old_names={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)
