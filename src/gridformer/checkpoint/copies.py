"""Which checkpoint a run resumes from, and the copies of checkpoints at `train.checkpoint_to`.

Before processes start, one of them looks at manifests and sizes; then all ranks verify all
checksums together. With `train.fallback` a damaged checkpoint is renamed, never removed, and a copy
or an older checkpoint takes its place. Commands that read a run without checkpoints read copies.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import (
    MANIFEST,
    STEP_FOLDER,
    Manifest,
    damage_remedy,
    verify_checkpoint,
)
from gridformer.checkpoint.side_files import copy_files
from gridformer.checkpoint.store import CONFIG, Kept, RemoteStore, step_of
from gridformer.comm.agree import first_text
from gridformer.config import TrainConfig
from gridformer.config.yaml_text import parse_yaml
from gridformer.mesh import Axes
from gridformer.utils.errors import CheckpointError, UserError
from gridformer.utils.files import private_prefix, read_text

# A path of the command line has lost one of the two slashes.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)
Check = Callable[[Manifest], None]  # raises CheckpointError if such a checkpoint must not be used


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that is not used, and a sentence that says why."""

    folder: Path
    why: str

    @property
    def reason(self) -> str:
        """The sentence without the advice to set what is set."""
        return re.split(r"[:;] (train\.fallback|no checkpoint is before)", self.why)[0]


@dataclass(frozen=True)
class ChosenCheckpoint:
    """The newest checkpoint of a run directory that is not known to be damaged."""

    folder: Path
    manifest: Manifest
    older: tuple[Path, ...] = ()  # newest first; none if the run must not use them
    damaged: tuple[Damaged, ...] = ()  # the checkpoints after it


# Given damaged checkpoints, newest first, and the one before them, or None: sets them aside, and
# returns an intact copy in their place that is newer than the one before; None if there is none.
Replace = Callable[[Sequence[Damaged], Path | None], Path | None]


def choose_checkpoint(
    train: TrainConfig,
    run_dir: Path,
    check: Check = lambda manifest: None,
    replaces: bool = True,
) -> ChosenCheckpoint | None:
    """Finds the checkpoint to resume from by manifests and sizes; None if there is none at all.

    If `replaces`, a copy that `check` accepts may take the place of a damaged checkpoint.

    Raises:
        CheckpointError: The newest checkpoint is damaged, or with `train.fallback` all are. It
            names a copy that can be used instead.
    """
    folders = find.complete(run_dir)[::-1]
    if not folders:
        return None
    verify = partial(verify_checkpoint, contents=False)
    replace = partial(replace_damaged, train.checkpoint_to if replaces else "", run_dir, check)
    try:
        if train.fallback:
            return _choose(folders, verify, replace)
        return ChosenCheckpoint(folders[0], verify(folders[0]))
    except CheckpointError as error:
        raise with_copy(error, train, run_dir) from None


def choose_together(folders: Sequence[Path], axes: Axes, replace: Replace) -> ChosenCheckpoint:
    """Finds the first checkpoint of several whose checksums are right.

    All ranks call it together, share the reading, and get the same result; also `replace`.

    Raises:
        CheckpointError: All of them are damaged.
    """

    def verify(folder: Path) -> Manifest:
        manifest, mine = None, ""
        try:
            manifest = verify_checkpoint(folder, part=axes.world.index, n_parts=axes.world.size)
        except (CheckpointError, OSError) as error:
            mine = str(error)
        if why := first_text(mine, axes.world):
            raise CheckpointError(why)
        assert manifest is not None
        return manifest

    return _choose(folders, verify, replace)


def _choose(
    folders: Sequence[Path], verify: Callable[[Path], Manifest], replace: Replace
) -> ChosenCheckpoint:
    damaged: list[Damaged] = []
    for number, folder in enumerate(folders, start=1):
        older = tuple(folders[number:])
        try:
            return ChosenCheckpoint(folder, verify(folder), older, tuple(damaged))
        except (CheckpointError, OSError) as error:
            damaged.append(Damaged(folder, str(error)))
        if copy := replace(damaged, older[0] if older else None):
            # Verified once more, because a rank of another machine may still see what was there.
            return _choose([copy, *older], verify, lambda damaged, before: None)
    why = damaged[0].why
    if len(damaged) > 1:
        why = (
            f"all {len(damaged)} checkpoints of {folders[0].parents[1]} are damaged "
            f"({why.split(': ')[0]}): restore one from a copy, or begin with another --out"
        )
    raise CheckpointError(why)


def replace_damaged(
    url: str, run_dir: Path, check: Check, damaged: Sequence[Damaged], before: Path | None
) -> Path | None:
    """Replaces damaged checkpoints of a run by the newest intact copy at a URL; see `Replace`.

    A line on standard error says so, or why a copy cannot be used. An empty URL has no copies.
    """
    if not url:
        return None

    def aside() -> None:
        for one in damaged:
            kept = set_aside(one.folder, "damaged")
            _say(
                f"{one.reason}; resuming from its copy {url.rstrip('/')}/{name}, as "
                f"train.fallback=true says, and keeping the damaged one as {kept}"
            )

    name = ""
    try:
        remote = RemoteStore(url)
        for name in reversed(remote.complete()):
            if before is not None and step_of(name) <= step_of(before.name):
                break
            copy = run_dir / "checkpoints" / name
            try:
                remote.download(name, copy, check, aside)
                return copy
            except CheckpointError as error:
                _say(f"{error}: this copy cannot replace {damaged[0].folder}")
    except Exception as error:  # each file system has errors of its own
        _say(f"no copy at {url} can replace {damaged[0].folder} ({type(error).__name__}: {error})")
    return None


def with_copy(error: CheckpointError, train: TrainConfig, run_dir: Path) -> CheckpointError:
    """Returns an error about the newest checkpoint that names the copy which can replace it.

    It is the error itself if there is no such copy, or if it is used without being asked for.
    """
    *older, newest = [None, *find.complete(run_dir)]
    if newest is None or not train.checkpoint_to or train.fallback:
        return error
    try:
        there = RemoteStore(train.checkpoint_to).complete()
    except Exception:  # the damage is what must be said
        return error
    if not there or (older[-1] and step_of(there[-1]) <= step_of(older[-1].name)):
        return error
    instead = (
        f"{train.checkpoint_to.rstrip('/')}/{there[-1]} is a copy: train.fallback=true verifies "
        f"it, resumes from it and keeps the damaged one aside, as does moving {newest} elsewhere"
    )
    return CheckpointError(str(error).replace(damage_remedy(newest), instead))


def set_aside(folder: Path, why: Literal["damaged", "rolled-back"]) -> Path:
    """Renames a checkpoint so that no run finds it, and returns its new path."""
    number, target = 1, folder.with_name(f"{why}-{folder.name}")
    while target.exists():
        number += 1
        target = folder.with_name(f"{why}-{folder.name}-{number}")
    folder.rename(target)
    return target


def _say(sentence: str) -> None:
    print(f"gridformer: {sentence}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------ copies


def clash(url: str, run_dir: Path) -> str:
    """Returns why copies at a URL would replace what a run itself has written, if they would."""
    try:
        folder = RemoteStore(url).local
    except UserError:  # which is said when the URL is used
        folder = None
    if folder is None:
        return ""
    there, out, own = folder.resolve(), run_dir.resolve(), (run_dir / "checkpoints").resolve()
    # A copy is made in a folder of such a name, which is emptied before.
    emptied = there in own.parents and STEP_FOLDER.fullmatch(own.relative_to(there).parts[0])
    if not (there in (out, own) or own in there.parents or emptied):
        return ""
    return (
        f"train.checkpoint_to={url} is where the run itself writes, as its directory is {run_dir}, "
        "so copies would replace its own files: name a folder outside the run directory, ideally "
        "on another disk, or leave train.checkpoint_to empty for no copies"
    )


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Turns errors of a file system, each of which has its own, into a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{source} cannot be read: {type(error).__name__}: {error}") from None


def fetch_newest(url: str, run_dir: Path, check: Check = lambda manifest: None) -> Path | None:
    """Copies the newest checkpoint at a URL into a run directory, unless that has one as new.

    Raises:
        UserError: The URL cannot be used, or a checkpoint there is damaged or must not be copied.
    """
    asked = f"train.checkpoint_to={url}"
    try:
        with reading(asked):
            remote, here = RemoteStore(url), find.latest(run_dir)
            there = remote.complete()
            if not there or (here and step_of(here.name) >= step_of(there[-1])):
                return None
            copy = run_dir / "checkpoints" / there[-1]
            remote.download(there[-1], copy, check)
            return copy
    except CheckpointError as error:
        raise UserError(f"{asked}: {error}") from None


def copy_newest(train: TrainConfig, run_dir: Path) -> str:
    """Copies the newest intact checkpoint of a run to `checkpoint_to`, unless one as new is there.

    A copy may have failed, or the run may have been killed while it copied. Contents are verified
    first, so nothing is read if there is nothing to copy.

    Returns:
        Why the newest checkpoint is not there; empty if it is, or if there is none.
    """
    folders, damage = find.complete(run_dir)[::-1], ""
    if not train.checkpoint_to or not folders:
        return ""
    try:
        remote = RemoteStore(train.checkpoint_to)
        newest = remote.complete()[-1:]
        for folder in folders:
            if newest and step_of(newest[0]) >= step_of(folder.name):
                break
            try:
                verify_checkpoint(folder)
            except CheckpointError as error:
                damage = damage or str(error)
                continue
            remote.upload(folder)
            Kept.of(train).prune(remote)
            break
    except Exception as error:  # each file system has errors of its own
        return f"{type(error).__name__}: {error}"
    return damage


def give_up(url: str, names: Collection[str]) -> str:
    """Removes copies of checkpoints from which a run has gone back, so that none resumes from them.

    Returns:
        What could not be done, as the end of a sentence; otherwise nothing.
    """
    if not url or not names:
        return ""
    try:
        remote = RemoteStore(url)
        for name in sorted(names, reverse=True):
            remote.remove(name)
    except Exception as error:  # each file system has errors of its own
        return (
            f"; {', '.join(sorted(names))} could not be removed from {url} "
            f"({type(error).__name__}: {error}): remove them before the run is started again"
        )
    return ""


# ------------------------------------------------------------------ commands that read


def url_of(path: Path) -> str | None:
    """Returns the URL that was given in the place of a path, or None if it is a path."""
    parts = _URL.fullmatch(str(path))
    if parts is None or path.exists():
        return None
    root = "/" if parts[1] in ("file", "local") else ""
    return f"{parts[1]}://{root}{parts[2]}"


@contextmanager
def run_with_checkpoints(
    run_dir: Path, tell: Callable[[str], None] = lambda doing: None, newest: int = 1
) -> Iterator[Path]:
    """Yields a run directory with its newest checkpoints, for commands that only read it.

    One that has checkpoints is read as it is, without asking its URL. If it has none, as on a
    machine that has lost them, or if it is a URL, the newest checkpoints and the small files that
    belong to a run are copied into a temporary folder.

    Args:
        run_dir: A run directory, one of its checkpoints, or a URL like `train.checkpoint_to`.
        newest: How many of the newest checkpoints are copied if they are elsewhere.

    Raises:
        UserError: The URL cannot be used, or has no intact checkpoint.
    """
    named = url_of(run_dir)
    url = named or _own_url(run_dir)
    if url is None:
        yield run_dir
        return
    asked = named or f"{url} (train.checkpoint_to of {run_dir}, which has no checkpoint)"
    with tempfile.TemporaryDirectory(prefix=private_prefix()) as folder:
        copy = Path(folder) / "run"
        with reading(asked):
            remote = RemoteStore(url)
            there = remote.complete()
            if not there:
                remedy = "name the train.checkpoint_to of the run" if named else "train first"
                raise CheckpointError(f"there is no checkpoint at {asked}: {remedy}")
            (copy / "checkpoints").mkdir(parents=True)
            for name in there[-newest:]:
                tell(f"copying {name} from {url}")
                remote.download(name, copy / "checkpoints" / name)
            remote.download_beside(copy)
        if not named:
            shutil.copyfile(run_dir / CONFIG, copy / CONFIG)
            copy_files(run_dir, copy)
        yield copy


def _own_url(run_dir: Path) -> str | None:
    """Returns `train.checkpoint_to` of a run directory that has no checkpoint of its own."""
    if (run_dir / MANIFEST).is_file() or not (run_dir / CONFIG).is_file() or find.latest(run_dir):
        return None
    try:
        url = parse_yaml(read_text(run_dir / CONFIG))["train"]["checkpoint_to"]
    except (UserError, ValueError, TypeError, LookupError):
        return None
    return url if isinstance(url, str) and url else None
