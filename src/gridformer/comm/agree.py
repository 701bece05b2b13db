"""Lets all ranks agree on one text, such as the description of a problem that one of them found."""

from __future__ import annotations

from dataclasses import replace

import torch

from gridformer.comm.collectives import all_reduce, broadcast
from gridformer.mesh import Axis
from gridformer.mesh.groups import objects_group

LABEL = "agree"
NOTHING = 1 << 62
_TEXT_BYTES = 1024


def first_text(mine: str, axis: Axis, key: int = 0) -> str:
    """Chooses one of the ranks' texts and returns it on all ranks, which must call this together.

    It is the text with the smallest key, and among equal keys that of the lowest rank.

    Args:
        mine: This rank's text, of which the first 1024 bytes are sent; empty if it has none.
        axis: The axis of all ranks of the run.
        key: A number below 2^62.
    """
    world = replace(axis, group=objects_group())
    best = int(all_reduce(torch.tensor(key if mine else NOTHING), world, "min", LABEL))
    if best == NOTHING:
        return ""
    is_mine = bool(mine) and key == best
    root = int(all_reduce(torch.tensor(world.index if is_mine else NOTHING), world, "min", LABEL))
    text = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    if root == world.index:
        content = mine.encode()[:_TEXT_BYTES]
        text[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    text = broadcast(text, world, root, LABEL)
    return bytes(text.numpy().tobytes()).rstrip(b"\0").decode(errors="ignore")
