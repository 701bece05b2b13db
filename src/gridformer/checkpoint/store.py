"""Where the checkpoints of a run are: in its directory, and perhaps as copies at a URL.

A local one is a hidden `Draft` until it is renamed. All ranks write into it and leave notes, which
are files because training uses the process groups meanwhile. At a URL, where folders cannot be
renamed, one is a checkpoint as soon as it has a manifest, which is copied last and removed first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import (
    MANIFEST,
    STEP_FOLDER,
    Manifest,
    read_manifest,
    verify_checkpoint,
)
from gridformer.checkpoint.side_files import SIDE_FILES, side_files
from gridformer.config import TrainConfig
from gridformer.utils.errors import CheckpointError, UserError
from gridformer.utils.files import (
    begin_folder,
    finish_folder,
    hidden_folder,
    remove_folder,
    remove_leftovers,
    sync_folder,
)

# What belongs to a run besides its checkpoints, and changes only with it.
CONFIG = "config.yaml"


def name_of(step: int) -> str:
    """Returns the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """Returns the step of a checkpoint, given its name."""
    return int(name.removeprefix("step-"))


@dataclass(frozen=True)
class Kept:
    """Which checkpoints stay."""

    newest: int  # how many of the newest
    every: int = 0  # besides, each whose step is a multiple of this number; 0 for none
    room: bool = False  # whether the oldest of the others is removed if the disk is full

    @staticmethod
    def of(train: TrainConfig) -> Kept:
        """Returns which checkpoints of a run stay."""
        return Kept(train.keep_checkpoints, train.keep_every, train.full_disk == "remove_oldest")

    def removable(self, names: list[str], newest: int) -> list[str]:
        """Returns which checkpoints, oldest first, may go if that number of the newest stays."""
        older = names[:-newest]
        return [name for name in older if not self.every or step_of(name) % self.every]

    def prune(self, store: LocalStore | RemoteStore) -> None:
        """Removes the checkpoints that do not stay."""
        for name in self.removable(store.complete(), self.newest):
            store.remove(name)


class LocalStore:
    """The folder `checkpoints` of a run directory, on storage that all ranks share."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.folder = run_dir, run_dir / "checkpoints"

    def complete(self) -> list[str]:
        """Returns the names of the complete checkpoints, the one with the fewest steps first."""
        return [path.name for path in find.complete(self.run_dir)]

    def remove(self, name: str) -> None:
        """Removes a checkpoint, so that no part of it is taken for one."""
        remove_folder(self.folder / name)

    def sweep(self) -> None:
        """Removes what killed processes left. No process may be writing there."""
        remove_leftovers(self.folder)

    def draft(self, name: str) -> Draft:
        """Returns the draft of a checkpoint, which need not exist yet."""
        return Draft(self.folder / name)


@contextlib.contextmanager
def writing_in(folder: Path, name: str) -> Iterator[BinaryIO]:
    """Opens a file to write, maybe in a folder in this one; it is on disk when the block ends."""
    path = folder / name
    if path.parent != folder:  # which itself is never made again: its save may be given up
        path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    if path.parent != folder:  # which is on disk when the folder is complete
        sync_folder(path.parent)


class Draft:
    """A checkpoint that is being written, as every rank sees it. Methods may raise OSError.

    Its notes are in a hidden folder beside it, which exists as long as the first rank works on the
    draft; while that takes long, it renews the folder's time.
    """

    def __init__(self, target: Path) -> None:  # the path of the complete checkpoint
        self.target, self._folder = target, hidden_folder(target)
        self._notes = hidden_folder(target, "-notes")
        self._renewed_ns = 0

    def begin(self) -> None:
        """Creates the draft, empty. The first rank calls it before any other method."""
        begin_folder(self._folder)
        begin_folder(self._notes)

    def writing(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Opens a file to write, as `writing_in`."""
        return writing_in(self._folder, name)

    def drop(self, name: str) -> None:
        """Removes a file, if it exists."""
        (self._folder / name).unlink(missing_ok=True)

    def tell(self, note: str, content: bytes = b"") -> None:
        """Leaves a note, which other ranks see whole or not at all.

        A note without content takes no space, so it can be left on a full disk.
        """
        if not content:
            (self._notes / note).touch()
            return
        half = self._notes / f".{note}"
        half.write_bytes(content)
        half.replace(self._notes / note)

    def untell(self, note: str) -> None:
        """Removes a note, if it exists."""
        (self._notes / note).unlink(missing_ok=True)

    def told(self) -> set[str]:
        """Returns the names of all notes."""
        return {name for name in os.listdir(self._notes) if not name.startswith(".")}

    def read(self, note: str) -> bytes:
        """Returns the content of a note."""
        return (self._notes / note).read_bytes()

    def renew(self) -> None:
        """Shows that the first rank still works on it."""
        self._notes.mkdir(parents=True, exist_ok=True)
        os.utime(self._notes)

    def renewed_ns(self) -> int | None:
        """Returns when a rank last worked on it; None before it was begun and once it is closed."""
        try:
            self._renewed_ns = self._notes.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        except OSError:
            pass  # nobody knows
        return self._renewed_ns

    def publish(self, manifest: bytes) -> None:
        """Makes the draft a checkpoint, whose manifest is its last file."""
        with self.writing(MANIFEST) as file:
            file.write(manifest)
        finish_folder(self._folder, self.target)  # replaces a checkpoint of the same step

    def close(self) -> None:
        """Removes what is left of the draft, if it can, so that no rank waits for it any longer."""
        for folder in (self._folder, self._notes):
            with contextlib.suppress(OSError):
                remove_folder(folder)


class RemoteStore:
    """The folder of checkpoints at a URL, such as `s3://bucket/run` or `file:///nfs/run`.

    The small files that generation and export need are beside the checkpoints, as in a run
    directory, and in each checkpoint.

    Raises:
        UserError: No file system is known for the URL, or what it needs is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise UserError(f"train.checkpoint_to={url} needs fsspec: pip install fsspec") from None
        try:
            opened: tuple[Any, str] = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"train.checkpoint_to={url}: {error}") from None
        self.url, (self.files, self.root) = url, opened

    def complete(self) -> list[str]:
        """Returns the names of the complete checkpoints, the one with the fewest steps first."""
        return [name for name in self._names() if self.files.exists(self._manifest(name))]

    def remove(self, name: str) -> None:
        """Removes a checkpoint, its manifest first, so that no part of it is taken for one."""
        if self.files.exists(self._manifest(name)):
            self.files.rm_file(self._manifest(name))
        if self.files.exists(f"{self.root}/{name}"):
            self.files.rm(f"{self.root}/{name}", recursive=True)

    @property
    def local(self) -> Path | None:
        """The folder, if the URL is one of this machine's file system; otherwise None."""
        from fsspec.implementations.local import LocalFileSystem

        return Path(self.root) if isinstance(self.files, LocalFileSystem) else None

    def upload(self, folder: Path) -> None:
        """Copies a complete checkpoint there, and replaces one of the same name.

        If the copy fails, what was written of it is removed as far as possible. Otherwise it would
        take space forever, because only complete checkpoints count toward the number that is kept.
        """
        names = {path.name for path in folder.iterdir() if path.is_file()} | {*side_files(folder)}
        target = f"{self.root}/{folder.name}"
        # The same folder can have two paths that do not look the same, as by a bind mount.
        if self.local and Path(target).exists() and Path(target).samefile(folder):
            raise OSError(f"{target} is the checkpoint itself, so it cannot be copied there")
        for name in {*self._names()} - {*self.complete()}:  # what killed processes left
            self.remove(name)
        for name in (CONFIG, *SIDE_FILES):
            here, there = folder.parents[1], f"{self.root}/{name}"
            size = self.files.size(there) if self.files.exists(there) else None
            if (here / name).is_file() and (here / name).stat().st_size != size:
                self._put(here, name, self.root)
        self.remove(folder.name)
        try:
            for name in sorted(names, key=lambda name: (name == MANIFEST, name)):
                self._put(folder, name, target)
        except Exception:
            with contextlib.suppress(Exception):  # the first error says what is wrong
                self.remove(folder.name)
            raise

    def download(
        self,
        name: str,
        target: Path,
        check: Callable[[Manifest], None] = lambda manifest: None,
        verified: Callable[[], None] = lambda: None,
    ) -> None:
        """Copies a checkpoint to a local folder, which appears when it is complete and verified.

        `check` raises a CheckpointError if one with such a manifest must not be copied, and
        `verified` is called before an intact copy appears.

        Raises:
            CheckpointError: What is there is damaged, or must not be copied.
        """
        # Under its own name, because the manifest is checked against it.
        aside = hidden_folder(target.with_name("download"))
        writing = aside / name
        begin_folder(writing)
        try:
            self._get(f"{self.root}/{name}", writing, (MANIFEST,))
            manifest = read_manifest(writing)
            check(manifest)
            self._get(f"{self.root}/{name}", writing, (*manifest.files, *manifest.side_files))
            verify_checkpoint(writing)
            verified()
            finish_folder(writing, target)
        except CheckpointError as error:
            there = f"{self.url.rstrip('/')}/{name}"
            raise CheckpointError(str(error).replace(str(writing), there)) from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def download_beside(self, run_dir: Path) -> None:
        """Copies the small files of the run to a local folder, as far as they are there."""
        names = [one for one in (CONFIG, *SIDE_FILES) if self.files.exists(f"{self.root}/{one}")]
        self._get(self.root, run_dir, names)

    def _manifest(self, name: str) -> str:
        return f"{self.root}/{name}/{MANIFEST}"

    def _names(self) -> list[str]:
        """Returns the names of all checkpoints there, whether complete or not, in their order."""
        self.files.invalidate_cache()
        there = self.files.ls(self.root, detail=True) if self.files.exists(self.root) else []
        names = {Path(one["name"]).name for one in there if one["type"] == "directory"}
        return sorted(filter(STEP_FOLDER.fullmatch, names), key=step_of)

    def _put(self, here: Path, name: str, there: str) -> None:
        """Copies a file of a folder to a folder there."""
        target = f"{there}/{name}"
        self.files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.files.put_file(str(here / name), target)

    def _get(self, there: str, here: Path, names: Collection[str]) -> None:
        """Copies files of a folder there to a local folder, as far as they are there."""
        for name in names:
            (here / name).parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self.files.get_file(f"{there}/{name}", str(here / name))
