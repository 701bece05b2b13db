"""Which checkpoint a run resumes from, if the newest one may be damaged: `train.fallback`.

Before processes start, one of them looks at manifests and sizes. All checksums are verified by all
ranks together, which then choose the same checkpoint. A damaged one is renamed, never removed.
A copy at `train.checkpoint_to` takes its place if it is newer than the checkpoint before it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import Manifest, verify_checkpoint
from gridformer.checkpoint.store import step_of
from gridformer.comm.agree import first_text
from gridformer.mesh import Axes
from gridformer.utils.errors import CheckpointError


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that is not used, and a sentence that says why."""

    folder: Path
    why: str

    @property
    def reason(self) -> str:
        """The sentence without the advice to set what is set."""
        return re.split(r"[:;] (train\.fallback|no checkpoint is before)", self.why)[0]


@dataclass(frozen=True)
class ChosenCheckpoint:
    """The newest checkpoint of a run directory that is not known to be damaged.

    Attributes:
        folder: The checkpoint.
        manifest: Its manifest.
        older: The checkpoints before it, newest first; none if the run must not use them.
        damaged: The checkpoints after it.
    """

    folder: Path
    manifest: Manifest
    older: tuple[Path, ...] = ()
    damaged: tuple[Damaged, ...] = ()


# Given damaged checkpoints, newest first, and the one before them, or None: sets them aside, and
# returns an intact copy in their place that is newer than the one before; None if there is none.
Replace = Callable[[Sequence[Damaged], Path | None], Path | None]
# Returns the manifest of an intact checkpoint, or a sentence that says what is wrong with it.
_Verify = Callable[[Path], Manifest | str]


def _with_none(damaged: Sequence[Damaged], before: Path | None) -> None:
    """Replaces no damaged checkpoint."""


def choose_checkpoint(
    run_dir: Path, fallback: bool, replace: Replace = _with_none
) -> ChosenCheckpoint | None:
    """Finds the checkpoint to resume from by manifests and sizes; None if there is none at all.

    Args:
        run_dir: The run directory.
        fallback: Whether an older checkpoint, or what `replace` returns, may replace a damaged one.
        replace: Replaces damaged ones by a copy.

    Raises:
        CheckpointError: The newest checkpoint is damaged, or with `fallback` all are.
    """
    folders = find.complete(run_dir)[::-1]
    if not folders:
        return None
    if not fallback:
        return ChosenCheckpoint(folders[0], verify_checkpoint(folders[0], contents=False))

    def verify(folder: Path) -> Manifest | str:
        try:
            return verify_checkpoint(folder, contents=False)
        except (CheckpointError, OSError) as error:
            return str(error)

    return _choose(folders, verify, replace)


def choose_together(
    folders: Sequence[Path], axes: Axes, replace: Replace = _with_none
) -> ChosenCheckpoint:
    """Finds the first checkpoint of several whose checksums are right.

    All ranks call it together, share the reading, and get the same result; also `replace`.

    Raises:
        CheckpointError: All of them are damaged.
    """

    def verify(folder: Path) -> Manifest | str:
        manifest, mine = None, ""
        try:
            manifest = verify_checkpoint(folder, part=axes.world.index, n_parts=axes.world.size)
        except (CheckpointError, OSError) as error:
            mine = str(error)
        return first_text(mine, axes.world) or manifest or ""

    return _choose(folders, verify, replace)


def _choose(folders: Sequence[Path], verify: _Verify, replace: Replace) -> ChosenCheckpoint:
    damaged: list[Damaged] = []
    for number, folder in enumerate(folders, start=1):
        verified, rest = verify(folder), tuple(folders[number:])
        if isinstance(verified, Manifest):
            return ChosenCheckpoint(folder, verified, rest, tuple(damaged))
        damaged.append(Damaged(folder, verified))
        if copy := replace(damaged, rest[0] if rest else None):
            # Verified once more, because a rank of another machine may still see what was there.
            chosen = _choose([copy, *rest], verify, _with_none)
            # The others have been set aside for the copy.
            left = [one for one in damaged if step_of(one.folder.name) < step_of(copy.name)]
            return dataclasses.replace(chosen, damaged=(*left, *chosen.damaged))
    why = damaged[0].why
    if len(damaged) > 1:
        why = (
            f"all {len(damaged)} checkpoints of {folders[0].parents[1]} are damaged "
            f"({why.split(': ')[0]}): restore one from a copy, or begin with another --out"
        )
    raise CheckpointError(why)


def set_aside(folder: Path, why: Literal["damaged", "rolled-back"]) -> Path:
    """Renames a checkpoint so that no run finds it, and returns its new path."""
    number, name = 1, f"{why}-{folder.name}"
    target = folder.with_name(name)
    while target.exists():
        number += 1
        target = folder.with_name(f"{name}-{number}")
    folder.rename(target)
    return target
