"""A second place for checkpoints, named by a URL of any file system that fsspec knows.

The run directory stays local. Each complete checkpoint is copied to the URL, its manifest last: an
object store cannot rename a folder, so there a folder is a checkpoint as soon as it has a manifest.
A run whose directory has no newer checkpoint begins with a copy of the newest one there.

The small files that generation and export need lie beside the checkpoints, as in a run directory,
and in each checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gridformer.checkpoint.manifest import (
    KEPT,
    MANIFEST,
    STEP_FOLDER,
    Manifest,
    read_manifest,
    verify_checkpoint,
)
from gridformer.checkpoint.outcome import Kept, step_of
from gridformer.checkpoint.side_files import SIDE_FILES, side_files
from gridformer.utils.errors import CheckpointError, UserError
from gridformer.utils.folders import begin_folder, finish_folder, hidden_folder

# What belongs to a run besides its checkpoints, and changes only with it.
CONFIG = "config.yaml"


def _any(manifest: Manifest) -> None:
    """Takes any checkpoint."""


def _nothing() -> None:
    """Does nothing."""


class Remote:
    """The folder of checkpoints at a URL, such as `s3://bucket/run` or `file:///nfs/run`.

    Args:
        url: The URL.

    Raises:
        UserError: No file system is known for it, or what it needs is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise UserError(f"train.checkpoint_to={url} needs fsspec: pip install fsspec") from None
        try:
            found: tuple[Any, str] = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"train.checkpoint_to={url}: {error}") from None
        self.url, (self.files, self.root) = url, found

    def complete(self) -> list[str]:
        """Returns the names of the complete checkpoints, the one with the fewest steps first."""
        self.files.invalidate_cache()
        if not self.files.exists(self.root):
            return []
        names = {Path(path).name for path in self.files.ls(self.root, detail=False)}
        steps = {int(named[1]): name for name in names if (named := STEP_FOLDER.fullmatch(name))}
        there = (steps[step] for step in sorted(steps))
        return [name for name in there if self.files.exists(f"{self.root}/{name}/{MANIFEST}")]

    @property
    def local(self) -> Path | None:
        """The folder, if the URL is one of this machine's file system; otherwise None."""
        from fsspec.implementations.local import LocalFileSystem

        return Path(self.root) if isinstance(self.files, LocalFileSystem) else None

    def upload(self, folder: Path) -> None:
        """Copies a complete checkpoint there, and replaces one of the same name.

        If the copy fails, what was written of it is removed as far as possible. Otherwise it would
        take space forever, because only complete checkpoints count toward the number that is kept.

        Raises:
            OSError: It could not be written.
        """
        files = {path.name for path in folder.iterdir() if path.is_file()}
        names = sorted(files | {*side_files(folder)})
        target = f"{self.root}/{folder.name}"
        # The same folder can have two paths that do not look the same, as by a bind mount.
        if self.local and Path(target).exists() and Path(target).samefile(folder):
            raise OSError(f"{target} is the checkpoint itself, so it cannot be copied there")
        self.sweep()
        self._upload_beside(folder.parents[1])
        self.remove(folder.name)
        try:
            for name in (*(name for name in names if name != MANIFEST), MANIFEST):
                self._put(folder, name, target)
        except Exception:
            with suppress(Exception):  # the first error says what is wrong
                self.remove(folder.name)
            raise

    def upload_newest(self, folder: Path, kept: Kept) -> None:
        """Copies the newest checkpoint of a run there, and removes copies that are not kept.

        Raises:
            OSError: It could not be written.
        """
        self.upload(folder)
        for name in kept.removable(self.complete(), kept.newest):
            self.remove(name)

    def sweep(self) -> None:
        """Removes what copies that were cut off have left: checkpoints without a manifest."""
        self.files.invalidate_cache()
        if not self.files.exists(self.root):
            return
        for found in self.files.ls(self.root, detail=True):
            name = Path(found["name"]).name
            if found["type"] != "directory" or not STEP_FOLDER.fullmatch(name):
                continue
            if MANIFEST not in self._sizes(f"{self.root}/{name}"):
                self.remove(name)

    def remove(self, name: str) -> None:
        """Removes a checkpoint, its manifest first, so that nobody takes the rest for one."""
        target = f"{self.root}/{name}"
        if self.files.exists(f"{target}/{MANIFEST}"):
            self.files.rm_file(f"{target}/{MANIFEST}")
        if self.files.exists(target):
            self.files.rm(target, recursive=True)

    def download(
        self,
        name: str,
        target: Path,
        check: Callable[[Manifest], None] = _any,
        verified: Callable[[], None] = _nothing,
    ) -> None:
        """Copies a checkpoint to a local folder, which appears when it is complete and verified.

        Args:
            name: The name of the checkpoint's folder at the URL.
            target: The folder to make.
            check: Raises a CheckpointError if a checkpoint with this manifest must not be copied.
            verified: Called when the copy is known to be intact, before it appears.

        Raises:
            CheckpointError: What is there is damaged, or must not be copied.
        """
        # Under its own name, because the manifest is checked against it.
        aside = hidden_folder(target.with_name("download"))
        writing = aside / name
        begin_folder(writing)
        try:
            self._get(f"{self.root}/{name}", writing, (MANIFEST,))
            check(read_manifest(writing))
            self._get(f"{self.root}/{name}", writing)
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
        self._get(self.root, run_dir, (CONFIG, *SIDE_FILES))

    def _upload_beside(self, run_dir: Path) -> None:
        """Copies the small files of a run there, unless they are there in the same size."""
        self.files.invalidate_cache()
        sizes = self._sizes_with_kept(self.root)
        for name in (CONFIG, *SIDE_FILES):
            path = run_dir / name
            if path.is_file() and sizes.get(name) != path.stat().st_size:
                self._put(run_dir, name, self.root)

    def _put(self, here: Path, name: str, there: str) -> None:
        """Copies a file of a folder to a folder there."""
        target = f"{there}/{name}"
        self.files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.files.put_file(str(here / name), target)

    def _get(self, there: str, here: Path, names: Collection[str] = ()) -> None:
        """Copies files of a folder there, all or those of some names, to a local folder."""
        for name in self._sizes_with_kept(there):
            if not names or name in names:
                (here / name).parent.mkdir(exist_ok=True)
                self.files.get_file(f"{there}/{name}", str(here / name))

    def _sizes_with_kept(self, folder: str) -> dict[str, int]:
        """Returns the sizes of the files in a folder there, and of those in its folder `KEPT`."""
        kept = self._sizes(f"{folder}/{KEPT}")
        return self._sizes(folder) | {f"{KEPT}/{name}": size for name, size in kept.items()}

    def _sizes(self, folder: str) -> dict[str, int]:
        """Returns the sizes of the files in a folder there; empty if there is no such folder."""
        if not self.files.exists(folder):
            return {}
        found = self.files.ls(folder, detail=True)
        return {Path(one["name"]).name: one["size"] for one in found if one["type"] == "file"}


def give_up(url: str, names: Collection[str]) -> str:
    """Removes checkpoints at a URL from which a run has gone back, so that none resumes from them.

    Args:
        url: The URL of `train.checkpoint_to`; nothing is done if it is empty.
        names: The names of their folders.

    Returns:
        What could not be done, as the end of a sentence; otherwise nothing.
    """
    if not url or not names:
        return ""
    try:
        remote = Remote(url)
        for name in sorted(names, reverse=True):
            remote.remove(name)
    except Exception as error:  # each file system has errors of its own
        return (
            f"; {', '.join(sorted(names))} could not be removed from {url} "
            f"({type(error).__name__}: {error}): remove them before the run is started again"
        )
    return ""


def fetch_newest(url: str, run_dir: Path, check: Callable[[Manifest], None] = _any) -> Path | None:
    """Copies the newest checkpoint at a URL into a run directory, unless that has one as new.

    Args:
        url: The URL of `train.checkpoint_to`.
        run_dir: The run directory.
        check: See `Remote.download`.

    Returns:
        The folder of the copy; None if there was nothing to copy.

    Raises:
        UserError: The URL cannot be used, or a checkpoint there is damaged or must not be copied.
    """
    from gridformer.checkpoint.find import complete

    asked = f"train.checkpoint_to={url}"
    copy: Path | None = None
    try:
        with reading(asked):
            remote = Remote(url)
            there = remote.complete()
            here = [folder.name for folder in complete(run_dir)]
            if there and not (here and step_of(here[-1]) >= step_of(there[-1])):
                copy = run_dir / "checkpoints" / there[-1]
                remote.download(there[-1], copy, check)
    except CheckpointError as error:
        raise UserError(f"{asked}: {error}") from None
    return copy


@contextmanager
def reading(place: str) -> Iterator[None]:
    """Turns errors of a file system into a `UserError`. Every file system has errors of its own.

    Args:
        place: What is read, for the message.

    Raises:
        UserError: The place cannot be read.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{place} cannot be read: {type(error).__name__}: {error}") from None
