"""What all ranks must know of something that one of them has found."""

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
    """Returns the same one of the texts of all ranks, which call it together, on all of them.

    That is the text with the smallest key, and of these the one of the first rank.

    Args:
        mine: This rank's text, at most 1024 bytes; an empty one is none.
        axis: The axis of all ranks of the run.
        key: Decides which text is chosen.

    Returns:
        The text, which is empty if no rank has one.
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
