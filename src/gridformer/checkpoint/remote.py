"""A second place for checkpoints, named by a URL of any file system that fsspec knows.

The run directory stays local. Each complete checkpoint is copied to the URL, its manifest last: an
object store cannot rename a folder, so there a folder is a checkpoint as soon as it has a manifest.
A run whose directory has no newer checkpoint begins with a copy of the newest one there.

The small files that generation and export need lie beside the checkpoints, as in a run directory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gridformer.checkpoint.manifest import KEPT, MANIFEST, STEP_FOLDER, verify
from gridformer.data.chat.stored import CHAT_FILE
from gridformer.data.label_names import LABELS_FILE
from gridformer.data.tokenizer import SETTINGS
from gridformer.utils.errors import CheckpointError, UserError
from gridformer.utils.folders import begin_folder, finish_folder, hidden_folder

# What belongs to a run besides its checkpoints, and changes only with it.
SIDE_FILES = ("config.yaml", "tokenizer.json", SETTINGS, CHAT_FILE, LABELS_FILE)
SIDE_FOLDER = KEPT


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
        """Returns the names of the complete checkpoints, the one of fewest steps first."""
        self.files.invalidate_cache()
        if not self.files.exists(self.root):
            return []
        names = {Path(path).name for path in self.files.ls(self.root, detail=False)}
        steps = {int(named[1]): name for name in names if (named := STEP_FOLDER.fullmatch(name))}
        there = (steps[step] for step in sorted(steps))
        return [name for name in there if self.files.exists(f"{self.root}/{name}/{MANIFEST}")]

    def upload(self, folder: Path) -> None:
        """Copies a complete checkpoint there; one of this name is replaced.

        Raises:
            OSError: It could not be written.
        """
        self._upload_beside(folder.parents[1])
        target = f"{self.root}/{folder.name}"
        self.remove(folder.name)
        self.files.makedirs(target, exist_ok=True)
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
        for name in (*(name for name in names if name != MANIFEST), MANIFEST):
            self.files.put_file(str(folder / name), f"{target}/{name}")

    def remove(self, name: str) -> None:
        """Removes a checkpoint, its manifest first, so that nobody takes the rest for one."""
        target = f"{self.root}/{name}"
        if self.files.exists(f"{target}/{MANIFEST}"):
            self.files.rm_file(f"{target}/{MANIFEST}")
        if self.files.exists(target):
            self.files.rm(target, recursive=True)

    def download(self, name: str, target: Path) -> None:
        """Copies a checkpoint to a local folder, which appears when it is complete and verified.

        Raises:
            CheckpointError: What is there is damaged.
        """
        # Under its own name, because the manifest is checked against it.
        aside = hidden_folder(target.with_name("download"))
        writing = aside / name
        begin_folder(writing)
        try:
            for path in self.files.ls(f"{self.root}/{name}", detail=False):
                self.files.get_file(path, str(writing / Path(path).name))
            verify(writing)
            finish_folder(writing, target)
        except CheckpointError as error:
            there = f"{self.url.rstrip('/')}/{name}"
            raise CheckpointError(str(error).replace(str(writing), there)) from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def download_beside(self, run_dir: Path) -> None:
        """Copies the small files of the run to a local folder, as far as they are there."""
        for name in self._sizes(self.root):
            if name in SIDE_FILES:
                self.files.get_file(f"{self.root}/{name}", str(run_dir / name))
        for name in self._sizes(f"{self.root}/{SIDE_FOLDER}"):
            (run_dir / SIDE_FOLDER).mkdir(exist_ok=True)
            path = f"{self.root}/{SIDE_FOLDER}/{name}"
            self.files.get_file(path, str(run_dir / SIDE_FOLDER / name))

    def _upload_beside(self, run_dir: Path) -> None:
        """Copies the small files of a run there, unless they are there in the same size."""
        self.files.invalidate_cache()
        for folder, names in ((".", SIDE_FILES), (SIDE_FOLDER, None)):
            here = run_dir / folder
            there = self.root if names else f"{self.root}/{SIDE_FOLDER}"
            sizes = self._sizes(there)
            for path in sorted(here.iterdir()) if here.is_dir() else ():
                if not path.is_file() or (names and path.name not in names):
                    continue
                if sizes.get(path.name) != path.stat().st_size:
                    self.files.makedirs(there, exist_ok=True)
                    self.files.put_file(str(path), f"{there}/{path.name}")

    def _sizes(self, folder: str) -> dict[str, int]:
        """Returns the sizes of the files in a folder there; empty if there is no such folder."""
        if not self.files.exists(folder):
            return {}
        found = self.files.ls(folder, detail=True)
        return {Path(one["name"]).name: one["size"] for one in found if one["type"] == "file"}


def fetch_newest(url: str, run_dir: Path) -> Path | None:
    """Copies the newest checkpoint at a URL into a run directory that has none as new.

    Returns:
        The folder of the copy; None if there was nothing to copy.

    Raises:
        UserError: The URL cannot be used, or a checkpoint there is damaged.
    """
    from gridformer.checkpoint.find import complete

    asked = f"train.checkpoint_to={url}"
    copy: Path | None = None
    try:
        with reading(asked):
            remote = Remote(url)
            there = remote.complete()
            here = [folder.name for folder in complete(run_dir)]
            if there and not (here and _step(here[-1]) >= _step(there[-1])):
                copy = run_dir / "checkpoints" / there[-1]
                remote.download(there[-1], copy)
    except CheckpointError as error:
        raise UserError(f"{asked}: {error}") from None
    return copy


@contextmanager
def reading(place: str) -> Iterator[None]:
    """Turns errors of a file system, each of which has some of its own, into a `UserError`.

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


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))
