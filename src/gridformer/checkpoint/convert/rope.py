"""Rotary positions in config.json: `rope_parameters`, or in older files rope_theta and scaling."""

from __future__ import annotations

from typing import Any

from gridformer.checkpoint.convert.config_keys import ConfigKeys
from gridformer.config import ModelConfig, any_of

_LENGTH = "original_max_position_embeddings"
# For each kind, the keys that it needs and those that it may have.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (_LENGTH,)),
    "yarn": (
        ("factor",),
        (_LENGTH, "attention_factor", "beta_fast", "beta_slow", "truncate"),
    ),
}
_THETA = 10000.0


def read_rope(keys: ConfigKeys) -> dict[str, Any]:
    """Returns our keys of rotary positions."""
    rope = keys.get("rope_parameters", None) or keys.get("rope_scaling", None) or {}
    if not isinstance(rope, dict) or any(isinstance(one, dict) for one in rope.values()):
        keys.problems.append(f"rope_parameters={rope}: gridformer has the same in all layers")
        rope = {}
    theta = rope.get("rope_theta", keys.get("rope_theta", _THETA))
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    found: dict[str, Any] = {"rope_theta": theta, "rope_scaling": None}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        factor = rope["partial_rotary_factor"]
        keys.problems.append(f"partial_rotary_factor={factor}: gridformer has only 1.0")
    if kind == "default":
        return found
    if kind not in _KEYS:
        keys.problems.append(f"rope_type={kind}: gridformer has only {any_of(('default', *_KEYS))}")
        return found
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        keys.problems.append(f"mscale={rope['mscale']}: gridformer has only attention_factor")
    needed, others = _KEYS[kind]
    keys.problems += [f"rope_type={kind} without {key}" for key in needed if rope.get(key) is None]
    scaling = {key: rope[key] for key in (*needed, *others) if rope.get(key) is not None}
    if _LENGTH in others:
        if (whole := keys.get(_LENGTH, None)) is not None:  # which has priority in transformers
            scaling[_LENGTH] = whole
        scaling.setdefault(_LENGTH, keys.size("max_position_embeddings"))
    found["rope_scaling"] = {"kind": kind, **scaling}
    return found


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Returns their keys of rotary positions, which old and new versions of transformers read."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_theta": config.rope_theta, "rope_scaling": None}
    needed, others = _KEYS[scaling.kind]
    values = {key: getattr(scaling, key) for key in (*needed, *others)}
    values = {key: value for key, value in values.items() if value is not None}
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": scaling.kind, **values},
    }
