"""GPT-2's table. Its matrices are [in, out] like ours, and q, k and v lie side by side."""

from __future__ import annotations

from typing import Any

from gridformer.checkpoint.convert.config_keys import ConfigKeys
from gridformer.checkpoint.convert.forms import SAME, SideBySide
from gridformer.checkpoint.convert.heads import head_entries, head_keys, read_heads
from gridformer.checkpoint.convert.table import Kind, TableEntry
from gridformer.config import ModelConfig, Task

_LAYER = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "norm2": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_LEAVES = ("weight", "bias")


def entries(config: ModelConfig) -> list[TableEntry]:
    """Returns the table of a GPT-2: how each of our parameters is stored there."""
    qkv = SideBySide(3, config.head_width)
    found = [
        TableEntry("tokens.weight", ("transformer.wte.weight",)),
        TableEntry("positions.weight", ("transformer.wpe.weight",)),
    ]
    for i in range(config.n_layers):
        found += [
            TableEntry(
                f"layers.{i}.{ours}.{leaf}",
                (f"transformer.h.{i}.{theirs}.{leaf}",),
                qkv if ours == "attention.qkv" else SAME,
            )
            for ours, theirs in _LAYER.items()
            for leaf in _LEAVES
        ]
    found += [TableEntry(f"norm.{leaf}", (f"transformer.ln_f.{leaf}",)) for leaf in _LEAVES]
    return found + head_entries(config, {"classifier.labels": "score"}, bias=False)


def read_config(keys: ConfigKeys, names: frozenset[str]) -> dict[str, Any]:
    """Returns the keys of our ModelConfig for a GPT-2.

    A value that our family does not have becomes one of `keys.problems`.

    Args:
        keys: The keys of their config.json.
        names: The names of the stored tensors, which tell what heads there are.
    """
    keys.only("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    keys.only("scale_attn_weights", (True,), True)
    keys.only("scale_attn_by_inverse_layer_idx", (False,), False)
    keys.only("add_cross_attention", (False,), False)
    keys.only("tie_word_embeddings", (True,), True)
    hidden = keys.size("n_embd")
    return read_heads(keys, names, "score.weight") | {
        "n_layers": keys.size("n_layer"),
        "hidden_size": hidden,
        "n_heads": keys.size("n_head"),
        "ffn_size": keys.get("n_inner", None) or 4 * hidden,
        "vocab_size": keys.size("vocab_size"),
        "max_seq_len": keys.size("n_positions"),
        "dropout": keys.get("resid_pdrop", 0.1),
        "attention_dropout": keys.get("attn_pdrop", 0.1),
        "norm_eps": keys.get("layer_norm_epsilon", 1e-5),
        "init_std": keys.get("initializer_range", 0.02),
    }


def write_config(config: ModelConfig, task: Task = "auto") -> dict[str, Any] | list[str]:
    """Returns the keys of their config.json for a GPT-2, or why there is none.

    Args:
        config: Our model.
        task: What the model has learned.

    Returns:
        The keys, or a list of problems if their class cannot represent the model.
    """
    problems: list[str] = []
    if config.head_width * config.n_heads != config.hidden_size:
        problems.append(
            f"head_dim={config.head_dim}: in transformers it is hidden_size / n_heads, "
            f"{config.hidden_size // config.n_heads}"
        )
    return problems or {
        **head_keys(config, task, "GPT2", "GPT2LMHeadModel"),
        "n_layer": config.n_layers,
        "n_embd": config.hidden_size,
        "n_head": config.n_heads,
        "n_inner": config.ffn_size,
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "activation_function": "gelu_new",
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
    }


GPT2 = Kind(
    "gpt2",
    "gpt2",
    entries,
    read_config,
    write_config,
    prefix="transformer.",
    skipped=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    repeats={"lm_head.weight": "transformer.wte.weight"},
)
