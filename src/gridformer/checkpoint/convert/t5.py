"""T5's table, of version 1.0: ReLU, and a head that shares the embedding's table."""

from __future__ import annotations

from typing import Any

from gridformer.checkpoint.convert.config_keys import ConfigKeys
from gridformer.checkpoint.convert.forms import TRANSPOSED, Interleaved
from gridformer.checkpoint.convert.heads import head_entries, head_keys, read_heads
from gridformer.checkpoint.convert.table import Kind, TableEntry
from gridformer.config import ModelConfig, Task

_LABELS = {
    "classifier.pooler": "classification_head.dense",
    "classifier.labels": "classification_head.out_proj",
}


def entries(config: ModelConfig) -> list[TableEntry]:
    """Returns the table of a T5: how each of our parameters is stored there."""
    found = [TableEntry("tokens.weight", ("shared.weight",))]
    for stack, n in (("encoder", config.n_layers), ("decoder", config.n_decoder_layers)):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        found.append(TableEntry(f"{stack}.bias.weight", (bias,)))
        for i in range(n):
            found += _layer(config, stack, i)
        found.append(TableEntry(f"{stack}.norm.weight", (f"{stack}.final_layer_norm.weight",)))
    return found + head_entries(config, _LABELS)


def _layer(config: ModelConfig, stack: str, i: int) -> list[TableEntry]:
    here, there, d = f"{stack}.layers.{i}", f"{stack}.block.{i}.layer", config.head_width

    def several(ours: str, theirs: str, parts: str) -> TableEntry:
        names = tuple(f"{there}.{theirs}.{part}.weight" for part in parts)
        form = Interleaved(len(parts), d) if len(parts) > 1 else TRANSPOSED
        return TableEntry(f"{here}.{ours}.weight", names, form)

    def norm(ours: str, number: int) -> TableEntry:
        return TableEntry(f"{here}.{ours}.weight", (f"{there}.{number}.layer_norm.weight",))

    found = [
        norm("norm1", 0),
        several("attention.qkv", "0.SelfAttention", "qkv"),
        several("attention.out", "0.SelfAttention", "o"),
    ]
    last = 1
    if stack == "decoder":
        last = 2
        found += [
            norm("cross_norm", 1),
            several("cross_attention.q", "1.EncDecAttention", "q"),
            several("cross_attention.kv", "1.EncDecAttention", "kv"),
            several("cross_attention.out", "1.EncDecAttention", "o"),
        ]
    dense = f"{there}.{last}.DenseReluDense"
    return [
        *found,
        norm("norm2", last),
        TableEntry(f"{here}.mlp.up.weight", (f"{dense}.wi.weight",), TRANSPOSED),
        TableEntry(f"{here}.mlp.down.weight", (f"{dense}.wo.weight",), TRANSPOSED),
    ]


def read_config(keys: ConfigKeys, names: frozenset[str]) -> dict[str, Any]:
    """Returns the keys of our ModelConfig for a T5.

    A value that our family does not have becomes one of `keys.problems`.

    Args:
        keys: The keys of their config.json.
        names: The names of the stored tensors, which tell what heads there are.
    """
    keys.only("feed_forward_proj", ("relu",), "relu", " (as in T5 v1.1)")
    keys.only("is_gated_act", (False, None), None)
    keys.only("tie_word_embeddings", (True,), True, " (as in T5 v1.1)")
    keys.only("scale_decoder_outputs", (True, None), None)
    return read_heads(keys, names, "classification_head.out_proj.weight") | {
        "n_layers": keys.size("num_layers"),
        "n_decoder_layers": keys.get("num_decoder_layers", None) or keys.size("num_layers"),
        "hidden_size": keys.size("d_model"),
        "n_heads": keys.size("num_heads"),
        "head_dim": keys.size("d_kv"),
        "ffn_size": keys.size("d_ff"),
        "vocab_size": keys.size("vocab_size"),
        # Relative positions have no longest sequence; T5 was trained on this one.
        "max_seq_len": keys.get("n_positions", 512),
        "relative_buckets": keys.get("relative_attention_num_buckets", 32),
        "relative_max_distance": keys.get("relative_attention_max_distance", 128),
        "dropout": keys.get("dropout_rate", 0.1),
        "norm_eps": keys.get("layer_norm_epsilon", 1e-6),
    }


def write_config(config: ModelConfig, task: Task = "auto") -> dict[str, Any] | list[str]:
    """Returns the keys of their config.json for a T5, or why there is none.

    Args:
        config: Our model.
        task: What the model has learned.

    Returns:
        The keys, or a list of problems if their class cannot represent the model.
    """
    return {
        **head_keys(config, task, "T5", "T5ForConditionalGeneration"),
        "is_encoder_decoder": True,
        "num_layers": config.n_layers,
        "num_decoder_layers": config.n_decoder_layers,
        "d_model": config.hidden_size,
        "num_heads": config.n_heads,
        "d_kv": config.head_width,
        "d_ff": config.ffn_size,
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_max_distance,
        "dropout_rate": config.dropout,
        "layer_norm_epsilon": config.norm_eps,
        "feed_forward_proj": "relu",
    }


def _written(config: ModelConfig, name: str) -> str:
    inside = config.n_labels and not name.startswith("classification_head.")
    return f"transformer.{name}" if inside else name


T5 = Kind(
    "t5",
    "t5",
    entries,
    read_config,
    write_config,
    prefix="",
    written=_written,
    old_names={"transformer.": ""},
    repeats=dict.fromkeys(
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
        "shared.weight",
    ),
    skipped=(
        # The first T5 checkpoints hold it, and no version of the model reads it.
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
)
