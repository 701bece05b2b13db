"""A preparation that goes on where it was stopped: its state beside the files that it writes.

The state is saved every few seconds, after the files are on disk. A preparation that was killed is
begun again with the same command; files are cut to what the last state says of them, and sources
are read from there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pydantic import Field, ValidationError

from gridformer.config import Config
from gridformer.data.prepare.reading import Position
from gridformer.data.prepare.replacing import check_free, written_whole
from gridformer.data.prepare.splitting import WriterState
from gridformer.utils.files import UnreadableError, read_json
from gridformer.utils.folders import begin_folder, finish_folder, hidden_folder

STATE, LOCK = "state.json", "lock"
SAVE_EVERY_S = 10.0


class PreparationState(Config):
    """How far a preparation is.

    Attributes:
        key: What is prepared and how; see `resume_key`.
        origin: Where the tokenizer comes from.
        position: The place in the sources.
        documents: The documents of each source that are written.
        n_bytes: The bytes of text of each source that are tokenized.
        dropped: What was left out after it was tokenized.
        writer: The files.
    """

    key: str
    origin: str
    position: Position
    documents: tuple[int, ...]
    n_bytes: tuple[int, ...]
    dropped: dict[str, int] = Field(default_factory=dict)
    writer: WriterState


class Unfinished:
    """The folder that a preparation writes.

    Attributes:
        folder: The hidden folder.
        state: The state from which it goes on, if it was stopped.
        keeps: Whether the folder stays if the preparation fails.
    """

    def __init__(self, folder: Path, state: PreparationState | None, can_keep: bool) -> None:
        self.folder, self.state = folder, state
        self._can_keep = can_keep
        self.keeps = can_keep and state is not None
        self._saved = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether it is time to save the state."""
        return self._can_keep and time.monotonic() - self._saved >= SAVE_EVERY_S

    def save(self, state: PreparationState) -> None:
        """Saves the state of files that are on disk."""
        if not self._can_keep:
            return
        new = self.folder / f"{STATE}.new"
        with new.open("w", encoding="utf-8") as file:
            file.write(state.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.folder / STATE)
        self.keeps = True
        self._saved = time.monotonic()

    def forget(self) -> None:
        """Removes the state, because the files change in a way that it does not describe."""
        (self.folder / STATE).unlink(missing_ok=True)
        self.keeps = self._can_keep = False


def resume_key(sources: object, files: Iterable[Path], settings: Mapping[str, object]) -> str:
    """Returns a hash of what determines a folder.

    Args:
        sources: What describes the sources.
        files: Their files, whose sizes and times of change count.
        settings: The settings.
    """
    text = json.dumps([sources, [_file(path) for path in files], settings], default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def resumable(out: Path, overwrite: bool, key: str) -> Iterator[Unfinished]:
    """Yields a hidden folder that replaces `out` when the block ends without an error.

    If the block fails before its state was saved, the folder is removed; otherwise it stays, and
    the next preparation with the same key goes on with it. While another process writes the same
    folder, the preparation cannot be resumed.

    Args:
        out: The folder to write.
        overwrite: Whether it may replace a token folder.
        key: What determines the folder; see `resume_key`.

    Raises:
        UserError: `out` may not be written; see `check_free`.
    """
    check_free(out, overwrite)
    target = out.resolve()  # keeps a link, and allows renaming a folder beside its target
    folder = hidden_folder(target)
    lock = _lock(folder)
    if lock is None:
        with written_whole(out, overwrite) as other:
            yield Unfinished(other, None, can_keep=False)
        return
    work = None
    try:
        state = _read(folder)
        if state is None or state.key != key or not _is_whole(folder, state):
            state = None
            for path in folder.iterdir():
                if path.name != LOCK:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        work = Unfinished(folder, state, can_keep=True)
        yield work
        check_free(out, overwrite)  # it may have changed since the first check
        for name in (STATE, LOCK):
            (folder / name).unlink(missing_ok=True)
        finish_folder(folder, target)
    finally:
        if work is None or not work.keeps:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def documents_kept(out: Path) -> int:
    """Returns how many documents a preparation of `out` that was stopped has written."""
    state = _read(hidden_folder(out.resolve()))
    return sum(state.documents) if state else 0


def _lock(folder: Path) -> int | None:
    """Creates and locks a folder; returns None if another process has it or locks do not work."""
    if not folder.exists():
        begin_folder(folder)
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that had it may have renamed the folder meanwhile.
        if os.path.samestat(os.fstat(descriptor), (folder / LOCK).stat()):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _read(folder: Path) -> PreparationState | None:
    try:
        return PreparationState.model_validate(read_json(folder / STATE))
    except (UnreadableError, ValidationError):
        return None


def _is_whole(folder: Path, state: PreparationState) -> bool:
    """Returns whether all files are there that a state counts on, and as long as it says."""
    files = [one for split in state.writer.files.values() for one in split.items()]
    try:
        return all((folder / name).stat().st_size >= size for name, size in files)
    except FileNotFoundError:
        return False


def _file(path: Path) -> tuple[str, int, int]:
    found = path.stat()
    return str(path), found.st_size, found.st_mtime_ns
