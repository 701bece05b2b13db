"""Llama, Mistral, Qwen2 and Qwen3: their table, and what their configs differ in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gridformer.checkpoint.convert.config_json import ConfigKeys
from gridformer.checkpoint.convert.table import Key, Kind, rows
from gridformer.config import ModelConfig, any_of
from gridformer.utils.units import format_value

_ROWS = rows(
    """
    tokens                        model.embed_tokens                      same
    layers.#.attention.qkv.q      model.layers.#.self_attn.q_proj         linear
    layers.#.attention.qkv.k      model.layers.#.self_attn.k_proj         linear
    layers.#.attention.qkv.v      model.layers.#.self_attn.v_proj         linear
    layers.#.attention.out        model.layers.#.self_attn.o_proj         linear
    layers.#.mlp.up.gate          model.layers.#.mlp.gate_proj            linear
    layers.#.mlp.up.up            model.layers.#.mlp.up_proj              linear
    layers.#.mlp.down             model.layers.#.mlp.down_proj            linear
    layers.#.norm1                model.layers.#.input_layernorm          same
    layers.#.norm2                model.layers.#.post_attention_layernorm same
    layers.#.attention.q_norm     model.layers.#.self_attn.q_norm         same if qk_norm
    layers.#.attention.k_norm     model.layers.#.self_attn.k_norm         same if qk_norm
    layers.#.attention.qkv.q.bias model.layers.#.self_attn.q_proj.bias    same if qkv_bias
    layers.#.attention.qkv.k.bias model.layers.#.self_attn.k_proj.bias    same if qkv_bias
    layers.#.attention.qkv.v.bias model.layers.#.self_attn.v_proj.bias    same if qkv_bias
    norm                          model.norm                              same
    head                          lm_head                                 same if untied
    classifier.labels             score                                   linear if labels
    span.ends.*                   qa_outputs.*                            linear if span_head
    """
)
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LENGTH = "original_max_position_embeddings"
# For each kind of rotary scaling, the keys that it needs and those that it may have.
_SCALINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (_LENGTH,)),
    "yarn": (("factor",), (_LENGTH, "attention_factor", "beta_fast", "beta_slow", "truncate")),
}


@dataclass(frozen=True)
class _Traits:
    """What one kind has that the others do not, and the defaults of its class in transformers.

    Attributes:
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


def _llama(name: str, traits: _Traits) -> Kind:
    """Rotary positions pair features as Hugging Face does, so every matrix is only transposed."""
    window = Key("sliding_window", written=lambda model: model.window or None)
    windows = {
        "none": [],
        "all": [window],
        "some": [
            Key("use_sliding_window", written=lambda model: bool(model.window)),
            window,
            Key("max_window_layers", written=lambda m: 0 if m.window else m.n_layers),
        ],
    }
    return Kind(
        name,
        "llama",
        name.capitalize(),
        lambda model: "ForCausalLM",
        rows=_ROWS,
        keys=[
            Key("num_hidden_layers", "n_layers"),
            Key("hidden_size", "hidden_size"),
            Key("num_attention_heads", "n_heads"),
            Key("num_key_value_heads", written=lambda model: model.kv_heads),
            Key("head_dim", written=lambda model: model.head_width),
            Key("intermediate_size", "ffn_size"),
            Key("vocab_size", "vocab_size"),
            Key("max_position_embeddings", "max_seq_len"),
            Key("tie_word_embeddings", "tied_head", False),
            Key("rope_theta", written=lambda model: model.rope_theta),
            Key("rope_scaling", written=_write_scaling),
            Key("hidden_act", written="silu"),
            Key("attention_dropout", "attention_dropout", 0.0),
            Key("rms_norm_eps", "norm_eps", 1e-6),
            Key("initializer_range", "init_std", 0.02),
            *windows[traits.window],
        ],
        # attention_bias would be in the output projection as well.
        fixed={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
        prefix="model.",
        read=partial(_read_llama, traits),
        unlike=partial(_unlike_llama, name, traits),
        renamed=lambda model, tensor: (
            tensor.replace("model.", traits.answering) if model.span_head else tensor
        ),
        old_names={"transformer.": "model."},
        skipped=(
            r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
            r"model\.rotary_emb\.inv_freq",
        ),
        repeats={"lm_head.weight": "model.embed_tokens.weight"},  # if the head is tied
        otherwise="write tie_word_embeddings: false into config.json if it has a head of its own",
    )


def _read_llama(
    traits: _Traits, keys: ConfigKeys, read: Mapping[str, Any], names: frozenset[str]
) -> dict[str, Any]:
    h, n = read["hidden_size"], read["n_heads"]
    kv_heads = keys.get("num_key_value_heads", traits.kv_heads) or n
    d = keys.get("head_dim", traits.head_dim) or 0
    return {
        "n_kv_heads": 0 if kv_heads == n else kv_heads,
        "head_dim": 0 if d and d * n == h else d,
        "qkv_bias": traits.qkv_bias,
        "qk_norm": traits.qk_norm,
        "window": _read_window(traits, keys, read["n_layers"]),
        **_read_rope(keys),
    }


def _read_window(traits: _Traits, keys: ConfigKeys, layers: Any) -> int:
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


def _read_rope(keys: ConfigKeys) -> dict[str, Any]:
    """Reads `rope_parameters`, or in older files rope_theta and rope_scaling."""
    rope = keys.get("rope_parameters", None) or keys.get("rope_scaling", None) or {}
    if not isinstance(rope, dict) or any(isinstance(one, dict) for one in rope.values()):
        keys.problems.append(f"rope_parameters={rope}: gridformer has the same in all layers")
        rope = {}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    theta = rope.get("rope_theta", keys.get("rope_theta", 10000.0))
    read: dict[str, Any] = {"rope_theta": theta, "rope_scaling": None}
    if (factor := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        keys.problems.append(f"partial_rotary_factor={factor}: gridformer has only 1.0")
    if kind == "default":
        return read
    if kind not in _SCALINGS:
        known = any_of(("default", *_SCALINGS))
        keys.problems.append(f"rope_type={kind}: gridformer has only {known}")
        return read
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        keys.problems.append(f"mscale={rope['mscale']}: gridformer has only attention_factor")
    needed, others = _SCALINGS[kind]
    keys.problems += [f"rope_type={kind} without {key}" for key in needed if rope.get(key) is None]
    scaling = {key: rope[key] for key in (*needed, *others) if rope.get(key) is not None}
    if _LENGTH in others:
        if (whole := keys.get(_LENGTH, None)) is not None:  # which has priority in transformers
            scaling[_LENGTH] = whole
        scaling.setdefault(_LENGTH, keys.size("max_position_embeddings"))
    return read | {"rope_scaling": {"kind": kind, **scaling}}


def _write_scaling(model: ModelConfig) -> dict[str, Any] | None:
    """Returns `rope_scaling`, which old and new versions of transformers read."""
    if (scaling := model.rope_scaling) is None:
        return None
    values = {key: getattr(scaling, key) for keys in _SCALINGS[scaling.kind] for key in keys}
    values = {key: value for key, value in values.items() if value is not None}
    return {"rope_type": scaling.kind, **values}


def _unlike_llama(kind: str, traits: _Traits, model: ModelConfig) -> list[str]:
    problems = [
        f"{key}={format_value(getattr(model, key))}: a {kind} has {key}={format_value(here)}"
        for key, here in (("qkv_bias", traits.qkv_bias), ("qk_norm", traits.qk_norm))
        if getattr(model, key) != here
    ]
    if model.window and traits.window == "none":
        problems.append(f"window={model.window}: a {kind} has none")
    if kind == "llama" and model.hidden_size % model.n_heads:
        problems.append(
            f"hidden_size={model.hidden_size}: for a llama transformers wants a multiple of "
            f"n_heads={model.n_heads}"
        )
    return problems


LLAMA_KINDS = (
    _llama("llama", _Traits()),
    _llama("mistral", _Traits(window="all", kv_heads=8, answering="model.")),
    _llama("qwen2", _Traits(qkv_bias=True, window="some", kv_heads=32)),
    _llama("qwen3", _Traits(qk_norm=True, window="some", kv_heads=32, head_dim=128)),
)
