"""Atomic folders: they are written under a hidden name and then renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gridformer.utils.errors import UserError

_WRITING, _REPLACED, _DELETING = ".writing-", ".replaced-", ".deleting-"
_PRIVATE = "gridformer-"


def hidden_folder(target: Path, suffix: str = "") -> Path:
    """Returns the hidden path beside `target` at which it is written until it is complete."""
    return target.with_name(f"{_WRITING}{target.name}{suffix}")


def begin_folder(writing: Path) -> None:
    """Creates an empty hidden folder, removing what a killed process left at this path."""
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)


def finish_folder(writing: Path, target: Path) -> None:
    """Renames a hidden folder to its final name, replacing any folder there.

    Raises:
        OSError: Renaming failed; a previous folder at `target` is then still there.
    """
    sync_folder(writing)
    # If a crash between the two renames leaves no folder, `remove_leftovers` puts the old one back.
    old = _gone(target, _REPLACED)
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


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields a hidden folder that becomes `out` when the block ends, and is removed on an error.

    Raises:
        UserError: There already is something at `out`, before or after the block.
    """
    refuse_existing(out)
    target = out.resolve()
    # The name is random because several processes may write the same folder at a time.
    writing = hidden_folder(target, f"-{secrets.token_hex(4)}")
    begin_folder(writing)
    try:
        yield writing
        refuse_existing(out)
        finish_folder(writing, target)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def refuse_existing(out: Path) -> None:
    """Raises UserError if there already is something at `out`."""
    if out.exists() or out.is_symlink():
        raise UserError(f"{out}: already exists, and is not replaced; choose another --out")


def remove_folder(folder: Path) -> None:
    """Removes a folder atomically: it is renamed first, so no part of it is left under its name."""
    gone = _gone(folder)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Removes folders that a killed process had begun to write, to replace or to remove.

    A folder that was to be replaced is put back if there is none in its place. Nobody may be
    writing there.
    """
    for old in parent.glob(f"{_REPLACED}*"):
        target = old.with_name(old.name.removeprefix(_REPLACED).rpartition("-")[0])
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)
    for prefix in (_DELETING, _WRITING):
        for leftover in parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def private_prefix() -> str:
    """Returns the prefix of the names of this process's temporary folders."""
    return f"{_PRIVATE}{os.getpid()}.{_process_numbers()}-"


def remove_private_leftovers(parent: Path | None = None) -> None:
    """Removes temporary folders of this user's processes that were killed, by default in TMPDIR."""
    parents = [parent] if parent else {Path(tempfile.gettempdir()), Path("/tmp")}
    for folder in (folder for where in parents for folder in where.glob(f"{_PRIVATE}*")):
        pid, _, numbers = folder.name.removeprefix(_PRIVATE).partition("-")[0].partition(".")
        if not pid.isdecimal() or numbers != _process_numbers() or _runs(int(pid)):
            continue
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def _process_numbers() -> str:
    """Names the PID namespace: containers that share a folder may number their processes apart."""
    try:
        return "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
    except OSError:
        return "0"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is another user's
    return True


def sync_folder(folder: Path) -> None:
    """Waits until the directory entries of a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _gone(folder: Path, prefix: str = _DELETING) -> Path:
    """Returns a hidden path to which a folder is renamed before it is removed."""
    return folder.with_name(f"{prefix}{folder.name}-{secrets.token_hex(4)}")
