"""The sizes of a network that a Hugging Face folder holds, from its config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gridformer.utils.files import UnreadableError, read_text
from gridformer.utils.units import MIB

# Keys of `model`, and the names that config.json has for them in one architecture or another.
_SIZES = {
    "n_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "n_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "n_kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "d_kv"),
    "ffn_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "max_seq_len": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}
_NEEDED = ("n_layers", "hidden_size", "n_heads", "vocab_size")


def sizes_of_folder(folder: str) -> dict[str, Any]:
    """Returns the values of `model` for the network in a folder.

    Raises:
        ValueError: The folder has no config.json, or that does not say how large the network is.
    """
    path = Path(folder) / "config.json"
    try:
        values = json.loads(read_text(path, MIB))
    except (UnreadableError, ValueError) as error:
        raise ValueError(f"folder={folder} has no config.json that can be read: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"folder={folder}: its config.json is not a mapping")
    sizes: dict[str, Any] = {}
    for key, names in _SIZES.items():
        said = [values[name] for name in names if isinstance(values.get(name), int)]
        if said and not isinstance(said[0], bool) and said[0] > 0:
            sizes[key] = said[0]
    if missing := [key for key in _NEEDED if key not in sizes]:
        names = ", ".join(_SIZES[key][0] for key in missing)
        raise ValueError(
            f"folder={folder}: its config.json has no {names}: gridformer prove and "
            "gridformer.parallelize take networks that are no language models"
        )
    tied = values.get("tie_word_embeddings", True)
    named = {"family": "network", "folder": str(Path(folder).resolve())}
    return {**named, "tied_head": tied, **sizes}
