"""Repeats in the log of memory how slices of activations are gathered after a message.

Devices that hold the same activations send one slice each and gather the slices. This is the same
for all messages of one shape, so it runs once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

from torch import Tensor

from gridformer.memory.tape import Numbers, Player, Step, steps_of
from gridformer.memory.tracker import MemoryTracker
from gridformer.parallel.pipeline.stage_io import StageIO
from gridformer.trace.repeated_products import NotRepeatableError


class _Fill:
    """Takes the place of `StageIO.fill`, which frees what it makes."""

    def __init__(self, fill: Callable[[Tensor, Tensor], None], tracker: MemoryTracker) -> None:
        self.fill, self.tracker = fill, tracker
        self._recorded: dict[Any, list[Step]] = {}

    def __call__(self, x: Tensor, received: Tensor) -> None:
        key = x.shape, x.stride(), x.dtype, received.shape
        if key in self._recorded:
            Player(self.tracker).play(self._recorded[key], {})
            return
        begins = len(self.tracker.changes)
        self.fill(x, received)
        with suppress(NotRepeatableError):
            numbers = Numbers()
            steps = steps_of(self.tracker.changes[begins:], numbers)
            if sum(step.what == "end" for step in steps) == len(numbers.entries):
                self._recorded[key] = steps


@contextmanager
def fills_once(stage_io: StageIO, tracker: MemoryTracker) -> Iterator[None]:
    """Lets received activations be filled in once for each shape, inside the context.

    Args:
        stage_io: The activations that enter and leave a rank's stages.
        tracker: Keeps the log, in which all messages appear.
    """
    with patch.object(stage_io, "fill", _Fill(stage_io.fill, tracker)):
        yield
