"""Which checkpoints stay, what they and their files are called, and what became of a save."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gridformer.config import TrainConfig


@dataclass(frozen=True)
class Kept:
    """Which checkpoints stay.

    Attributes:
        newest: How many of the newest.
        every: Besides, each whose step is a multiple of this number; 0 for none.
        room: Whether the oldest of the others is removed if the disk is full.
    """

    newest: int
    every: int = 0
    room: bool = False

    @staticmethod
    def of(train: TrainConfig) -> Kept:
        """Returns which checkpoints of a run stay."""
        room = train.full_disk == "remove_oldest"
        return Kept(train.keep_checkpoints, train.keep_every, room)

    def removable(self, names: list[str], newest: int) -> list[str]:
        """Returns which of the complete checkpoints may go if that number of the newest stays.

        Args:
            names: The names of the complete checkpoints, oldest first.
            newest: How many of the newest stay, at least 1.
        """
        older = names[:-newest]
        return [name for name in older if not self.every or step_of(name) % self.every]


def name_of(step: int) -> str:
    """Returns the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """Returns the step of a checkpoint, given its name."""
    return int(name.removeprefix("step-"))


@dataclass
class SaveOutcome:
    """What became of a save. Only the first rank knows it.

    Attributes:
        target: The path of the checkpoint.
        step: Its step.
        n_bytes: The bytes of all its files.
        seconds: The time from its beginning to its end.
        failure: Why there is no checkpoint; empty if it is complete.
        full: Whether all that was missing is space.
        removed: Checkpoints that were removed to make room.
        not_copied: Why the complete checkpoint is not at `train.checkpoint_to`; empty if it is, or
            if there is no such place.
    """

    target: str
    step: int
    n_bytes: int = 0
    seconds: float = 0.0
    failure: str = ""
    full: bool = False
    removed: list[str] = field(default_factory=list)
    not_copied: str = ""


def file_of(rank: int) -> str:
    """Returns the name of the file that a rank writes."""
    return f"shard-{rank + 1:05d}.safetensors"
