"""The largest layout that tests plan, check and estimate: gpt-175b on 4,096 ranks."""

from __future__ import annotations

from typing import Any

from gridformer.config import RunConfig, parse_run

SECTIONS: dict[str, dict[str, Any]] = {
    "layout": {
        "scheme": "optimus",
        "rows": 8,
        "cols": 8,
        "dp": 4,
        "pp": 16,
        "micro_batches": 64,
    },
    "train": {"global_batch": 2048, "dtype": "bfloat16", "recompute": "full"},
}
# The same for the command line.
WORDS = [
    "gpt-175b",
    *(f"{name}.{key}={value}" for name, keys in SECTIONS.items() for key, value in keys.items()),
]


def gpt_175b() -> RunConfig:
    return parse_run({"model": "gpt-175b", "data": {"path": "none"}, **SECTIONS})
