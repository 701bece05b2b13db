"""Reads the keys of Hugging Face's config.json and collects what cannot be represented."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gridformer.config.base import any_of

# Keys that change what a model computes wherever they occur, and the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "pruned_heads": (None, {}),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
    "n_routed_experts": (None, 0),
    "partial_rotary_factor": (None, 1.0),
    "cross_attention_hidden_size": (None,),
}
# The types of values that are no numbers.
_TYPES: dict[str, tuple[type, str]] = {
    "layer_types": (list, "a list"),
    "id2label": (dict, "a mapping"),
    "rope_parameters": (dict, "a mapping"),
    "rope_scaling": (dict, "a mapping"),
}


class ConfigKeys:
    """The keys of a config.json.

    A key that is absent has the default of its class in transformers, since that library writes
    only what differs from it.

    Args:
        values: The content of config.json.

    Attributes:
        problems: What gridformer cannot represent, one sentence each.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.problems: list[str] = []
        for key, neutral in _NEUTRAL.items():
            self.only(key, neutral, neutral[0])

    def get(self, key: str, default: Any) -> Any:
        """Returns a value, or the default if it is absent. Another type is a problem."""
        value = self.values.get(key, default)
        wanted, name = _TYPES.get(key, ((int, float), "a number"))
        if value is None or isinstance(value, wanted):
            return value
        self.problems.append(f"{key}={value} is not {name}")
        return default

    def size(self, key: str) -> Any:
        """Returns a value that every config.json has."""
        if self.values.get(key) is None:
            self.problems.append(f"{key} is missing")
            return 1
        return self.get(key, 1)

    def only(self, key: str, allowed: tuple[Any, ...], default: Any, why: str = "") -> Any:
        """Returns a value, which must be one of some values.

        Args:
            key: The key.
            allowed: The values that gridformer can represent, the usual one first.
            default: The value if the key is absent.
            why: What else to say if it has another value.
        """
        value = self.values.get(key, default)
        if value not in allowed:
            known = [one for one in allowed if one is not None] or ["null"]
            words = any_of(str(one).lower() if isinstance(one, bool) else one for one in known)
            told = str(value).lower() if isinstance(value, bool) else value
            self.problems.append(f"{key}={told}{why}: gridformer has only {words}")
        return value
