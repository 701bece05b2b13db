"""What one process does, of those that train a network on a layout."""

from __future__ import annotations

from typing import Any

from benchmarks.coverage.networks import build
from gridformer.config import LayoutConfig
from gridformer.prove import compare


def of_module(name: str, changes: dict[str, Any], layout: dict[str, Any]) -> str:
    """Compares an architecture on a layout. Returns equal, or what differs."""
    module, inputs = build(name, changes)
    proof = compare(module, inputs, LayoutConfig(**layout))
    if proof is None or proof.equal:
        return "equal"
    assert proof.worst is not None
    return f"wrong: {proof.worst['name']}, {proof.worst['relative']:.1e}"
