"""Writes a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gridformer.cluster import Cluster
from gridformer.cluster import tables as t

_HEAD = """\
# Written by `gridformer calibrate`, for `gridformer predict` and `gridformer plan --cluster FILE`.
# Rows of the tables have microseconds at their end; the columns are those below.
"""
_ROWS: dict[str, Any] = {
    "products": t.ProductRow,
    "attention": t.AttentionRow,
    "memory": t.MemoryRow,
    "messages": t.MessageRow,
    "host": t.HostRow,
}


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Writes a cluster to a YAML file, which `load_cluster` reads."""
    data: dict[str, Any] = cluster.model_dump(mode="json")
    data.pop("name")
    tables = data.pop("tables")
    head = yaml.safe_dump(data, sort_keys=False, width=1000, allow_unicode=True)
    lines = ["tables:", f"  source: {yaml.safe_dump(tables['source'], width=1000).splitlines()[0]}"]
    for name, row_type in _ROWS.items():
        if tables[name]:
            lines.append(f"  {name}:  # {', '.join(row_type._fields)}")
            lines += [f"    - [{', '.join(map(_text, row))}]" for row in tables[name]]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_HEAD + head + "\n".join(lines) + "\n", encoding="utf-8")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) and value < 1e6 else f"{value}"
