"""Finds the checkpoints of a run directory."""

from __future__ import annotations

import shlex
from pathlib import Path

from gridformer.checkpoint.manifest import MANIFEST, STEP_FOLDER, removed_error
from gridformer.utils.errors import CheckpointError
from gridformer.utils.files import exists, meant_beside


def latest(run_dir: Path) -> Path | None:
    """Returns the newest complete checkpoint of a run directory, or None."""
    found = complete(run_dir)
    return found[-1] if found else None


def newest(run_dir: Path) -> Path:
    """Returns a checkpoint itself, or the newest complete one of a run directory.

    Args:
        run_dir: A run directory, or one of its checkpoints.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    if (run_dir / MANIFEST).is_file():
        return run_dir
    found = latest(run_dir)
    if (
        STEP_FOLDER.fullmatch(run_dir.name)
        and not exists(run_dir)
        and latest(run_dir.parent.parent)
    ):
        raise removed_error(run_dir)
    if found is None:
        meant = "" if exists(run_dir) else meant_beside(run_dir, latest)
        said = f" (did you mean '{meant}'?)" if meant else ""
        typed = shlex.quote(str(run_dir))
        remedy = (
            f"it is a folder of Hugging Face's, so first run `gridformer import {typed} --out "
            "RUNDIR`"
            if (run_dir / "config.json").is_file()
            else "train first, for example with `gridformer train configs/runs/demo.yaml --out "
            f"{typed}`"
        )
        raise CheckpointError(f"{run_dir} has no checkpoint{said}: {remedy}")
    return found


def complete(run_dir: Path) -> list[Path]:
    """Returns the complete checkpoints of a run directory, the one with the fewest steps first.

    Folders with other names than those that `save` gives are not among them.
    """
    found = {}
    for folder in (run_dir / "checkpoints").glob("step-*"):
        named = STEP_FOLDER.fullmatch(folder.name)
        if named and folder.name == f"step-{int(named[1]):08d}" and folder.is_dir():
            found[int(named[1])] = folder
    return [found[step] for step in sorted(found)]
