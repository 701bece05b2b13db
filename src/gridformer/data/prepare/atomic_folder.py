"""Writes a token folder that appears complete or not at all, and goes on where it was stopped.

A state is saved beside the files every few seconds, after they are on disk. When the same command
is begun again, files are cut to what the last state says, and sources are read from there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from gridformer.data.prepare.reading import Cursor
from gridformer.data.prepare.split_file import WriterState
from gridformer.data.tokenfolder import INDEX, is_own_file, is_token_folder
from gridformer.utils.errors import UserError
from gridformer.utils.files import (
    UnreadableError,
    begin_folder,
    finish_folder,
    hidden_folder,
    read_json,
)

STATE, LOCK = "state.json", "lock"
SAVE_EVERY_S = 10.0


@dataclass
class PreparationState:
    """How far a preparation is."""

    key: str  # a hash of what is prepared and how
    origin: str  # of the tokenizer
    documents: list[int]  # of each source that are written
    n_bytes: list[int]  # of text of each source that are tokenized
    writer: WriterState = field(default_factory=WriterState)
    cursor: Cursor = field(default_factory=Cursor)
    dropped: Counter[str] = field(default_factory=Counter)  # after it was read


_STATE = TypeAdapter(PreparationState)


@dataclass
class Unfinished:
    """The folder that a preparation writes."""

    folder: Path
    state: PreparationState | None  # from which it goes on, if it was stopped
    can_keep: bool  # whether its state may be saved
    keeps: bool  # whether the folder stays if the preparation fails
    saved: float = field(default_factory=time.monotonic)

    @property
    def is_due(self) -> bool:
        """Whether it is time to save the state."""
        return self.can_keep and time.monotonic() - self.saved >= SAVE_EVERY_S

    def save(self, state: PreparationState) -> None:
        """Saves the state of files that are on disk."""
        new = self.folder / f"{STATE}.new"
        with new.open("wb") as file:
            file.write(_STATE.dump_json(state))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.folder / STATE)
        self.keeps, self.saved = True, time.monotonic()

    def forget(self) -> None:
        """Removes the state, because the files change in a way that it does not describe."""
        (self.folder / STATE).unlink(missing_ok=True)
        self.keeps = self.can_keep = False


def check_free(out: Path, overwrite: bool) -> None:
    """Checks that `out` may be written: it is absent, empty, or a token folder to overwrite.

    A folder that contains anything but a token folder's own files is never replaced.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out}: is a file; choose another --out")
    present = {path.name for path in out.iterdir()}
    if not present:
        return
    unsafe = ""
    if foreign := sorted(name for name in present if not is_own_file(name)):
        unsafe = f"holds {', '.join(foreign[:3])}, which prepare did not write"
    elif not is_token_folder(out):
        unsafe = f"is not empty, and its {INDEX} does not make it a token folder"
    if unsafe:
        raise UserError(f"{out}: {unsafe}, so it is not replaced; choose another --out")
    if not overwrite:
        raise UserError(f"{out}: already is a token folder; add --overwrite to replace it")


@contextlib.contextmanager
def atomic_folder(out: Path, overwrite: bool, key: str | None) -> Iterator[Unfinished]:
    """Yields a hidden folder that replaces `out` when the block ends without an error.

    If the block fails after its state was saved, the folder stays, and the next preparation with
    the same key goes on with it; otherwise it is removed. Without a key, and while another process
    writes the same folder, the preparation cannot be resumed. A process that is killed leaves the
    hidden folder behind without an index, so that it cannot be mistaken for a token folder.
    """
    check_free(out, overwrite)
    target = out.resolve()  # keeps a link, and allows renaming a folder beside its target
    folder = hidden_folder(target)
    lock = None if key is None else _lock(folder)
    if lock is None:
        # The name is random because several processes may write the same folder at a time.
        folder = hidden_folder(target, f"-{secrets.token_hex(4)}")
        begin_folder(folder)
    work = None
    try:
        state = _read(folder)
        if state is None or state.key != key or not _is_whole(folder, state):
            state = None
            for path in folder.iterdir():
                if path.name != LOCK:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        work = Unfinished(folder, state, lock is not None, state is not None)
        yield work
        check_free(out, overwrite)  # it may have changed since the first check
        for name in (STATE, LOCK):
            (folder / name).unlink(missing_ok=True)
        finish_folder(folder, target)
    finally:
        if work is None or not work.keeps:
            shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def documents_kept(out: Path) -> int:
    """Returns how many documents a preparation of `out` that was stopped has written."""
    state = _read(hidden_folder(out.resolve()))
    return sum(state.documents) if state else 0


def _lock(folder: Path) -> int | None:
    """Creates and locks a folder; returns None if another process has it or locks do not work."""
    if not folder.exists():
        begin_folder(folder)
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that had it may have renamed the folder meanwhile.
        if os.path.samestat(os.fstat(descriptor), (folder / LOCK).stat()):
            return descriptor
    if descriptor is not None:
        os.close(descriptor)
    return None


def _read(folder: Path) -> PreparationState | None:
    try:
        return _STATE.validate_python(read_json(folder / STATE))
    except (UnreadableError, ValidationError):
        return None


def _is_whole(folder: Path, state: PreparationState) -> bool:
    """Returns whether all files are there that a state counts on, and as long as it says."""
    files = [one for split in state.writer.files.values() for one in split.items()]
    try:
        return all((folder / name).stat().st_size >= size for name, size in files)
    except FileNotFoundError:
        return False
