"""Config keys that were renamed, and the conversion of runs that were saved under the old names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Maps an old dotted key to its new dotted key in the same section.
RENAMED = {"train.loss_tokens": "train.loss_chunk_tokens"}


def with_new_names(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a run that an older version saved, with old keys renamed to new ones.

    Only saved runs are read through this function. In a run file that a user writes, an old key is
    an error whose message names the new key.

    Args:
        run: Mapping from section to mapping of keys; it is not modified.
    """
    sections = {
        name: dict(section) if isinstance(section, Mapping) else section
        for name, section in run.items()
    }
    for old, new in RENAMED.items():
        (section, old_key), new_key = old.split("."), new.split(".")[1]
        values = sections.get(section)
        if isinstance(values, dict) and old_key in values:
            values.setdefault(new_key, values.pop(old_key))
    return sections
