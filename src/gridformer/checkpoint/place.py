"""Where the checkpoints of a run lie, and how a complete one appears there.

A checkpoint in the making is a `Draft`. All ranks write their files into it, each leaves a small
note when its file is complete, and the first rank publishes the draft when it has found the notes
of all ranks. Notes are files, not messages, because saves go on while training uses the process
groups.

In a local folder a draft is a hidden folder, which is renamed when it is complete, so a folder with
a plain name is complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from gridformer.checkpoint.find import complete
from gridformer.checkpoint.manifest import MANIFEST
from gridformer.checkpoint.side_files import read_side_files
from gridformer.utils.folders import (
    begin_folder,
    finish_folder,
    hidden_folder,
    remove_folder,
    remove_leftovers,
    sync_folder,
)

_NOTES = ".notes"


class Draft(Protocol):
    """A checkpoint that is being written, as every rank sees it.

    Every method may raise OSError.
    """

    @property
    def target(self) -> str:
        """The path of the checkpoint when it is complete, for messages."""

    def begin(self) -> None:
        """Creates the draft, empty. The first rank calls it before any other method."""

    def writing(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Opens a file to write. When the block ends without an error the file is on disk."""

    def drop(self, name: str) -> None:
        """Removes a file, if it exists."""

    def tell(self, note: str, content: bytes = b"") -> None:
        """Leaves a note, which other ranks see whole or not at all.

        A note without content takes no space, so it can be left on a full disk.

        Args:
            note: The name of the note.
            content: What it says.
        """

    def told(self) -> set[str]:
        """Returns the names of all notes."""

    def read(self, note: str) -> bytes:
        """Returns the content of a note."""

    def exists(self) -> bool:
        """Whether the draft is still being written."""

    def publish(self, manifest: bytes) -> None:
        """Makes the draft a checkpoint, whose manifest is its last file."""

    def going_on(self, begins: bool) -> None:
        """Says that the save goes on after publishing, or, without `begins`, that it is over.

        It is said again and again while the save goes on, see `sign`.
        """

    def sign(self) -> int | None:
        """Returns a number that changes each time `going_on` says that the save is not over.

        None means that it never did, or that the save is over.
        """

    def abandon(self) -> None:
        """Removes the draft and everything in it."""


class CheckpointPlace(Protocol):
    """A folder of checkpoints."""

    def draft(self, name: str) -> Draft:
        """Returns the draft of the checkpoint `name`, which need not exist yet."""

    def complete(self) -> list[str]:
        """Returns the names of the complete checkpoints, the one with the fewest steps first."""

    def remove(self, name: str) -> None:
        """Removes a checkpoint, so that no part of it is left under its name."""

    def sweep(self) -> None:
        """Removes what killed processes left. No save may be under way."""

    def side_files(self) -> dict[str, bytes]:
        """Returns the small files beside the checkpoints; see `read_side_files`."""

    def free_bytes(self) -> int | None:
        """Returns the free space for files, or None if it is not known."""


class LocalPlace:
    """The folder `checkpoints` of a run directory, on storage that all ranks share."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.folder = run_dir, run_dir / "checkpoints"

    def draft(self, name: str) -> LocalDraft:
        return LocalDraft(self.folder / name)

    def complete(self) -> list[str]:
        return [path.name for path in complete(self.run_dir)]

    def remove(self, name: str) -> None:
        remove_folder(self.folder / name)

    def sweep(self) -> None:
        remove_leftovers(self.folder)
        for folder in complete(self.run_dir):
            shutil.rmtree(folder / _NOTES, ignore_errors=True)

    def side_files(self) -> dict[str, bytes]:
        return read_side_files(self.run_dir)

    def free_bytes(self) -> int | None:
        try:
            return shutil.disk_usage(self.folder).free
        except OSError:
            return None


@contextlib.contextmanager
def writing_in(folder: Path, name: str) -> Iterator[BinaryIO]:
    """Opens a file to write, which may be in a folder in this one; see `Draft.writing`."""
    path = folder / name
    if path.parent != folder:  # which itself is never made again: its save may be given up
        path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    if path.parent != folder:  # which is on disk when the folder is complete
        sync_folder(path.parent)


class LocalDraft:
    """A draft in a hidden folder."""

    def __init__(self, target: Path) -> None:
        self._target, self.folder = target, hidden_folder(target)
        self._notes = self.folder / _NOTES
        self._more = self.folder.with_name(f"{self.folder.name}-more")

    @property
    def target(self) -> str:
        return str(self._target)

    def begin(self) -> None:
        begin_folder(self.folder)
        self._notes.mkdir()

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        with writing_in(self.folder, name) as file:
            yield file

    def drop(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def tell(self, note: str, content: bytes = b"") -> None:
        if not content:
            (self._notes / note).touch()
            return
        half = self._notes / f".{note}"
        half.write_bytes(content)
        half.replace(self._notes / note)

    def told(self) -> set[str]:
        return {name for name in os.listdir(self._notes) if not name.startswith(".")}

    def read(self, note: str) -> bytes:
        return (self._notes / note).read_bytes()

    def exists(self) -> bool:
        return self._notes.is_dir() or self._more.is_dir()

    def publish(self, manifest: bytes) -> None:
        with self.writing(MANIFEST) as file:
            file.write(manifest)
        finish_folder(self.folder, self._target)  # replaces a checkpoint of the same step
        shutil.rmtree(self._target / _NOTES, ignore_errors=True)

    def going_on(self, begins: bool) -> None:
        if begins:
            self._more.mkdir(exist_ok=True)
            os.utime(self._more)
        elif self._more.exists():
            self._more.rmdir()

    def sign(self) -> int | None:
        try:
            return self._more.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def abandon(self) -> None:
        self.going_on(False)
        if self.folder.exists():
            remove_folder(self.folder)
