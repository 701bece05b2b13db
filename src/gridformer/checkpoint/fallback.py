"""Which checkpoint a run resumes from, if the newest one may be damaged: `train.fallback`.

Before processes start, one of them looks at manifests and sizes. All checksums are verified by all
ranks together, which then choose the same checkpoint. A damaged one is renamed, never removed.
A copy at `train.checkpoint_to` takes its place if it is newer than the checkpoint before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import Manifest, read_manifest, verify_checkpoint
from gridformer.checkpoint.outcome import step_of
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


def _with_none(damaged: Sequence[Damaged], before: Path | None) -> None:
    """Replaces no damaged checkpoint."""


def choose_checkpoint(
    run_dir: Path, fallback: bool, replace: Replace = _with_none
) -> ChosenCheckpoint | None:
    """Finds the checkpoint to resume from by manifests and sizes; None if there is none at all.

    Args:
        run_dir: The run directory.
        fallback: Whether an older checkpoint may replace a damaged one.
        replace: With `fallback`, replaces damaged ones by a copy.

    Raises:
        CheckpointError: The newest checkpoint is damaged, or with `fallback` all are.
    """
    folders = find.complete(run_dir)[::-1]
    damaged: list[Damaged] = []
    found: Manifest | None = None
    for folder in folders:
        try:
            found = verify_checkpoint(folder, contents=False)
            break
        except (CheckpointError, OSError) as error:
            if not fallback:
                raise
            damaged.append(Damaged(folder, str(error)))
    rest = folders[len(damaged) :]
    if damaged and (copy := replace(damaged, rest[0] if rest else None)):
        left = _before(copy, damaged)
        return ChosenCheckpoint(copy, read_manifest(copy), tuple(rest), left)
    if found is not None:
        older = tuple(rest[1:]) if fallback else ()
        return ChosenCheckpoint(rest[0], found, older, tuple(damaged))
    if damaged:
        raise _none_left(run_dir, damaged)
    return None


def choose_together(
    folders: Sequence[Path], axes: Axes, replace: Replace = _with_none
) -> ChosenCheckpoint:
    """Finds the first checkpoint of several whose checksums are right.

    All ranks call it together, share the reading, and get the same result.

    Args:
        folders: The checkpoints, the preferred one first.
        axes: The axes of the mesh.
        replace: Replaces damaged ones by a copy. All ranks call it together.

    Raises:
        CheckpointError: All of them are damaged.
    """
    damaged: list[Damaged] = []
    for number, folder in enumerate(folders):
        manifest, mine = None, ""
        try:
            manifest = verify_checkpoint(folder, part=axes.world.index, n_parts=axes.world.size)
        except (CheckpointError, OSError) as error:
            mine = str(error)
        why = first_text(mine, axes.world)
        if not why:
            assert manifest is not None
            return ChosenCheckpoint(folder, manifest, tuple(folders[number + 1 :]), tuple(damaged))
        damaged.append(Damaged(folder, why))
        rest = folders[number + 1 :]
        if copy := replace(damaged, rest[0] if rest else None):
            # Verified once more, because a rank of another machine may still see what was there.
            found = choose_together([copy, *rest], axes)
            left = (*_before(copy, damaged), *found.damaged)
            return ChosenCheckpoint(found.folder, found.manifest, found.older, left)
    raise _none_left(folders[0].parents[1], damaged)


def set_aside(folder: Path, why: Literal["damaged", "rolled-back"]) -> Path:
    """Renames a checkpoint so that no run finds it, and returns its new path."""
    number, name = 1, f"{why}-{folder.name}"
    target = folder.with_name(name)
    while target.exists():
        number += 1
        target = folder.with_name(f"{name}-{number}")
    folder.rename(target)
    return target


def _before(copy: Path, damaged: Sequence[Damaged]) -> tuple[Damaged, ...]:
    """Returns the damaged checkpoints before a copy. The others have been set aside for it."""
    return tuple(one for one in damaged if step_of(one.folder.name) < step_of(copy.name))


def _none_left(run_dir: Path, damaged: Sequence[Damaged]) -> CheckpointError:
    why = damaged[0].why.split(": ")[0]
    return CheckpointError(
        f"all {len(damaged)} checkpoints of {run_dir} are damaged ({why}): restore one from a "
        "copy, or begin with another --out"
        if len(damaged) > 1
        else damaged[0].why
    )
