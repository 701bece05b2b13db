"""Compares the last checkpoints of two runs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Returns every parameter and moment of a checkpoint, whole, by name."""
    blocks: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            sharding = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                offsets = sharding[name]["saved_offsets"]
                blocks.setdefault(name, []).append((tuple(offsets), file.get_tensor(name)))
    return {name: _joined(found) for name, found in blocks.items()}


def _joined(blocks: list[tuple[tuple[int, ...], torch.Tensor]]) -> torch.Tensor:
    ends = [[at + n for at, n in zip(o, b.shape, strict=True)] for o, b in blocks]
    whole = torch.full([max(sizes) for sizes in zip(*ends, strict=True)], torch.nan).to(
        blocks[0][1].dtype
    )
    for offsets, block in blocks:
        where = tuple(slice(at, at + n) for at, n in zip(offsets, block.shape, strict=True))
        whole[where] = block
    return whole


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Returns the largest difference between two checkpoints, relative where values exceed 1.

    It is 0.0 exactly if all bits are equal, and infinite if names or shapes differ.
    """
    if {n: t.shape for n, t in one.items()} != {n: t.shape for n, t in other.items()}:
        return float("inf")
    worst = 0.0
    for name, want in one.items():
        got = other[name]
        if torch.equal(want, got):
            continue
        found = ((want - got).abs() / want.abs().clamp(min=1.0)).max().item()
        worst = max(worst, float("inf") if found != found else found)
    return worst
