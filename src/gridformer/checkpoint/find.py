"""Finds the checkpoints of a run directory."""

from __future__ import annotations

import shlex
from pathlib import Path

from gridformer.checkpoint.manifest import MANIFEST, STEP_FOLDER, removed_error
from gridformer.utils.errors import CheckpointError
from gridformer.utils.files import exists, meant_beside


def complete(run_dir: Path) -> list[Path]:
    """Returns the complete checkpoints of a run directory, the one with the fewest steps first.

    Folders with other names than those that a save gives are not among them.
    """
    folders = {}
    for folder in (run_dir / "checkpoints").glob("step-*"):
        named = STEP_FOLDER.fullmatch(folder.name)
        if named and folder.name == f"step-{int(named[1]):08d}" and folder.is_dir():
            folders[int(named[1])] = folder
    return [folders[step] for step in sorted(folders)]


def latest(run_dir: Path) -> Path | None:
    """Returns the newest complete checkpoint of a run directory, or None."""
    folders = complete(run_dir)
    return folders[-1] if folders else None


def newest(run_dir: Path) -> Path:
    """Returns a checkpoint itself, or the newest complete one of a run directory.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    if (run_dir / MANIFEST).is_file():
        return run_dir
    if (folder := latest(run_dir)) is not None:
        return folder
    there = exists(run_dir)
    if not there and STEP_FOLDER.fullmatch(run_dir.name) and latest(run_dir.parent.parent):
        raise removed_error(run_dir)
    meant = "" if there else meant_beside(run_dir, latest)
    said = f" (did you mean '{meant}'?)" if meant else ""
    typed = shlex.quote(str(run_dir))
    train = f"gridformer train configs/runs/demo.yaml --out {typed}"
    remedy = f"train first, for example with `{train}`"
    if (run_dir / "config.json").is_file():
        import_ = f"gridformer import {typed} --out RUNDIR"
        remedy = f"it is a folder of Hugging Face's, so first run `{import_}`"
    raise CheckpointError(f"{run_dir} has no checkpoint{said}: {remedy}")
