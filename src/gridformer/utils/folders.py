"""Folders that appear whole or not at all: written under a hidden name, then renamed."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

_DELETING = ".deleting-"


def hidden_folder(target: Path, suffix: str = "") -> Path:
    """Where `target` is written until it is whole: beside it, so that it can be renamed."""
    return target.with_name(f".writing-{target.name}{suffix}")


def begin_folder(writing: Path) -> None:
    """Make a hidden folder to write into, without what a process that was killed left there."""
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)


def finish_folder(writing: Path, target: Path) -> None:
    """Give what was written its name; a folder of that name goes, but stays where this fails."""
    sync_folder(writing)
    old = _gone(target)
    replaces = target.exists()
    if replaces:
        target.rename(old)
    try:
        writing.rename(target)
    except BaseException:
        if replaces:
            old.rename(target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder; under its own name it is never seen in part."""
    gone = _gone(folder)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Remove what a process that was killed had begun to remove."""
    for leftover in parent.glob(f"{_DELETING}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Wait until a folder's names are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _gone(folder: Path) -> Path:
    return folder.with_name(f"{_DELETING}{folder.name}-{secrets.token_hex(4)}")
