"""The table of Llama, Mistral, Qwen2 and Qwen3, and what their configs differ in.

Rotary positions pair features as Hugging Face does, so every matrix is only transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from gridformer.checkpoint.convert.config_keys import ConfigKeys
from gridformer.checkpoint.convert.forms import SAME, TRANSPOSED
from gridformer.checkpoint.convert.heads import head_entries, head_keys, read_heads
from gridformer.checkpoint.convert.rope import read_rope, write_rope
from gridformer.checkpoint.convert.table import Kind, TableEntry
from gridformer.config import ModelConfig, Task
from gridformer.utils.units import format_value

_NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
_HEAD_NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
_QKV = {f"attention.qkv.{part}": f"self_attn.{part}_proj" for part in "qkv"}
_LINEARS = {
    **_QKV,
    "attention.out": "self_attn.o_proj",
    "mlp.up.gate": "mlp.gate_proj",
    "mlp.up.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class _Traits:
    """What one kind has that the others do not, and the defaults of its class in transformers.

    Attributes:
        qkv_bias: Whether queries, keys and values have biases.
        qk_norm: Whether heads are normalized.
        window: Whether there may be a sliding window: in no layer, in all of them, or in those that
            `layer_types` or `max_window_layers` names.
        kv_heads: The number of key/value heads; None means that of query heads.
        head_dim: The width of a head; None means hidden_size / num_attention_heads.
        answering: What names of tensors begin with in the class for answers to questions.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    window: str = "none"
    kv_heads: int | None = None
    head_dim: int | None = None
    answering: str = "transformer."


_TRAITS = {
    "llama": _Traits(),
    "mistral": _Traits(window="all", kv_heads=8, answering="model."),
    "qwen2": _Traits(qkv_bias=True, window="some", kv_heads=32),
    "qwen3": _Traits(qk_norm=True, window="some", kv_heads=32, head_dim=128),
}


def entries(config: ModelConfig) -> list[TableEntry]:
    """Returns the table of a Llama or similar model: how each of our parameters is stored there."""
    found = [TableEntry("tokens.weight", ("model.embed_tokens.weight",))]
    for i in range(config.n_layers):
        here, there = f"layers.{i}", f"model.layers.{i}"
        norms = {**_NORMS, **(_HEAD_NORMS if config.qk_norm else {})}
        found += [
            TableEntry(f"{here}.{ours}.weight", (f"{there}.{theirs}.weight",), form)
            for names, form in ((_LINEARS, TRANSPOSED), (norms, SAME))
            for ours, theirs in names.items()
        ]
        if config.qkv_bias:
            found += [
                TableEntry(f"{here}.{ours}.bias", (f"{there}.{theirs}.bias",))
                for ours, theirs in _QKV.items()
            ]
    found.append(TableEntry("norm.weight", ("model.norm.weight",)))
    if config.token_head and not config.tied_head:
        found.append(TableEntry("head.weight", ("lm_head.weight",)))
    return found + head_entries(config, {"classifier.labels": "score"}, bias=False)


def read_config(traits: _Traits, keys: ConfigKeys, names: frozenset[str]) -> dict[str, Any]:
    """Returns the keys of our ModelConfig for a Llama or similar model.

    A value that our family does not have becomes one of `keys.problems`.

    Args:
        traits: What distinguishes this kind of model.
        keys: The keys of their config.json.
        names: The names of the stored tensors, which tell what heads there are.
    """
    keys.only("hidden_act", ("silu",), "silu")
    # It would be in the output projection as well.
    keys.only("attention_bias", (False,), False)
    keys.only("mlp_bias", (False,), False)
    h, n = keys.size("hidden_size"), keys.size("num_attention_heads")
    kv_heads = keys.get("num_key_value_heads", traits.kv_heads) or n
    d = keys.get("head_dim", traits.head_dim) or 0
    layers = keys.size("num_hidden_layers")
    return read_heads(keys, names, "score.weight") | {
        "n_layers": layers,
        "hidden_size": h,
        "n_heads": n,
        "n_kv_heads": 0 if kv_heads == n else kv_heads,
        "head_dim": 0 if d and d * n == h else d,
        "ffn_size": keys.size("intermediate_size"),
        "vocab_size": keys.size("vocab_size"),
        "max_seq_len": keys.size("max_position_embeddings"),
        "tied_head": keys.get("tie_word_embeddings", False),
        "qkv_bias": traits.qkv_bias,
        "qk_norm": traits.qk_norm,
        "window": _window(traits, keys, layers),
        **read_rope(keys),
        "attention_dropout": keys.get("attention_dropout", 0.0),
        "norm_eps": keys.get("rms_norm_eps", 1e-6),
        "init_std": keys.get("initializer_range", 0.02),
    }


def _window(traits: _Traits, keys: ConfigKeys, layers: Any) -> int:
    """Returns the window that all layers have, 0 for none."""
    window = keys.get("sliding_window", 4096) or 0
    types = [str(one) for one in keys.get("layer_types", None) or ()]
    if traits.window == "none":
        types, window = types or [_FULL], 0
    elif traits.window == "all":
        kind, other = (_SLIDING, _FULL) if window else (_FULL, _SLIDING)
        types = types or [kind]
        if {*types} == {other}:
            keys.problems.append(
                f"layer_types of {other} contradict sliding_window={window or 'null'}, which is "
                "all that transformers reads in this model: remove one of them"
            )
    elif not keys.get("use_sliding_window", False):
        types, window = types or [_FULL], 0
    elif not types:
        first = min(keys.get("max_window_layers", 28) or 0, layers)
        types = [_FULL] * (first > 0) + [_SLIDING] * (layers > first)
    different = sorted({*types})
    if different not in ([_FULL], [_SLIDING]):
        keys.problems.append(
            f"layers of several kinds ({', '.join(different)}): gridformer has only the same "
            "attention in all layers"
        )
    return 0 if different == [_FULL] else window


def write_config(kind: str, config: ModelConfig, task: Task = "auto") -> dict[str, Any] | list[str]:
    """Returns the keys of their config.json for a Llama or similar model, or why there is none.

    Args:
        kind: The `model_type` there.
        config: Our model.
        task: What the model has learned.

    Returns:
        The keys, or a list of problems if their class cannot represent the model.
    """
    traits = _TRAITS[kind]
    problems: list[str] = []
    for key, here in (("qkv_bias", traits.qkv_bias), ("qk_norm", traits.qk_norm)):
        if getattr(config, key) != here:
            value = format_value(getattr(config, key))
            problems.append(f"{key}={value}: a {kind} has {key}={format_value(here)}")
    if config.window and traits.window == "none":
        problems.append(f"window={config.window}: a {kind} has none")
    if kind == "llama" and config.hidden_size % config.n_heads:
        problems.append(
            f"hidden_size={config.hidden_size}: for a llama transformers wants a multiple of "
            f"n_heads={config.n_heads}"
        )
    if problems:
        return problems
    name = kind.capitalize()
    found = {
        **head_keys(config, task, name, f"{name}ForCausalLM"),
        "num_hidden_layers": config.n_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.ffn_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.tied_head,
        **write_rope(config),
        "hidden_act": "silu",
        "attention_dropout": config.attention_dropout,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
    }
    if traits.window == "all":
        found["sliding_window"] = config.window or None
    elif traits.window == "some":
        found["use_sliding_window"] = bool(config.window)
        found["sliding_window"] = config.window or None
        found["max_window_layers"] = 0 if config.window else config.n_layers
    return found


def _written(traits: _Traits, config: ModelConfig, name: str) -> str:
    return name.replace("model.", traits.answering) if config.span_head else name


def _kind(name: str, traits: _Traits) -> Kind:
    read: Callable[[ConfigKeys, frozenset[str]], dict[str, Any]] = partial(read_config, traits)
    return Kind(
        name,
        "llama",
        entries,
        read,
        partial(write_config, name),
        prefix="model.",
        written=partial(_written, traits),
        old_names={"transformer.": "model."},
        skipped=(
            r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
            r"model\.rotary_emb\.inv_freq",
        ),
        repeats={"lm_head.weight": "model.embed_tokens.weight"},  # if the head is tied
        otherwise="write tie_word_embeddings: false into config.json if it has a head of its own",
    )


LLAMA_KINDS = tuple(_kind(name, traits) for name, traits in _TRAITS.items())
