"""What one process does, of those that train a network on a layout."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from tests.support.multirank import exactness
from tests.support.multirank.matrix import SETTINGS

from benchmarks.coverage.networks import build
from gridformer.config import LayoutConfig
from gridformer.exactness import EQUAL
from gridformer.models import NetworkModel
from gridformer.prove import compare, in_float64


def of_module(name: str, changes: dict[str, Any], layout: dict[str, Any]) -> str:
    """Compares an architecture on a layout. Returns equal, or what differs."""
    module, inputs = build(name, changes)
    proof = compare(module, inputs, LayoutConfig(**layout))
    if proof is None or proof.equal:
        return "equal"
    assert proof.worst is not None
    return f"wrong: {proof.worst['name']}, {proof.worst['relative']:.1e}"


def compared_widely(*args: Any) -> dict[str, float]:
    """Compares a run as the exactness matrix does; routers that cast to float32 do not round."""
    run = NetworkModel.run

    def wide(*args: Any, **kwargs: Any) -> Any:
        with in_float64():
            return run(*args, **kwargs)

    with patch.object(NetworkModel, "run", wide):
        return exactness.compare(*args)


def of_folder(sizes: dict[str, Any], layout: dict[str, Any]) -> str:
    """Compares the trainer's network of a folder on a layout in the same way."""
    worst = compared_widely(layout, sizes, {**SETTINGS, "clip_norm": 1e-4}, 2)
    relative, kind = max((value, kind) for kind, value in worst.items())
    return "equal" if relative <= EQUAL else f"wrong: {kind}, {relative:.1e}"
