"""What runs and commands do with the copies of checkpoints at `train.checkpoint_to`.

Each complete checkpoint is copied there by the save that wrote it. A run whose directory has no
newer checkpoint begins with a copy of the newest one, an intact copy replaces a damaged
checkpoint, and commands that read a run directory without checkpoints read copies.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from gridformer.checkpoint import find
from gridformer.checkpoint.fallback import ChosenCheckpoint, Damaged, choose_checkpoint, set_aside
from gridformer.checkpoint.manifest import (
    MANIFEST,
    STEP_FOLDER,
    Manifest,
    damage_remedy,
    verify_checkpoint,
)
from gridformer.checkpoint.side_files import copy_side_files
from gridformer.checkpoint.store import CONFIG, Kept, RemoteStore, step_of
from gridformer.config import TrainConfig
from gridformer.config.yaml_text import parse_yaml
from gridformer.utils.errors import CheckpointError, UserError
from gridformer.utils.files import read_text
from gridformer.utils.folders import private_prefix

# A path of the command line has lost one of the two slashes.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)
Tell = Callable[[str], None]
Check = Callable[[Manifest], None]  # raises CheckpointError if such a checkpoint must not be copied


def clash(url: str, run_dir: Path) -> str:
    """Returns why copies at a URL would replace what a run itself has written, if they would."""
    try:
        folder = RemoteStore(url).local
    except UserError:  # which is said when the URL is used
        folder = None
    if folder is None:
        return ""
    there, out, own = folder.resolve(), run_dir.resolve(), (run_dir / "checkpoints").resolve()
    clashes = there in (out, own) or own in there.parents
    if there in own.parents:  # a copy is made in a folder of such a name, which is emptied before
        clashes = clashes or bool(STEP_FOLDER.fullmatch(own.relative_to(there).parts[0]))
    if not clashes:
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


# ------------------------------------------------------------------ runs


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
        there = remote.complete()
        for folder in folders:
            if there and step_of(there[-1]) >= step_of(folder.name):
                break
            try:
                verify_checkpoint(folder)
            except CheckpointError as error:
                damage = damage or str(error)
                continue
            remote.upload_newest(folder, Kept.of(train))
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


def replace_damaged(
    url: str, run_dir: Path, check: Check, damaged: Sequence[Damaged], before: Path | None
) -> Path | None:
    """Replaces damaged checkpoints of a run by the newest intact copy at a URL, and returns it.

    Those that are as new as the copy are set aside, once it is verified. A line on standard error
    says so, or why a copy cannot be used.

    Args:
        url: The URL of `train.checkpoint_to`; nothing is done if it is empty.
        run_dir: The run directory.
        check: Whether a checkpoint may be copied.
        damaged: The newest checkpoints, newest first.
        before: The checkpoint before them; only a newer copy is used.
    """
    if not url:
        return None

    def aside() -> None:
        for one in damaged:
            if step_of(one.folder.name) >= step_of(name):
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


def choose_or_replace(
    train: TrainConfig, run_dir: Path, check: Check, replaces: bool = True
) -> ChosenCheckpoint | None:
    """Finds the checkpoint to resume from, as `choose_checkpoint` does; it may become a copy.

    Args:
        train: The settings of the run.
        run_dir: The run directory.
        check: Whether a checkpoint may be copied.
        replaces: Whether damaged checkpoints may be replaced now.

    Raises:
        CheckpointError: The newest checkpoint is damaged, or with `train.fallback` all are. It
            names a copy that can be used instead.
    """
    url = train.checkpoint_to if replaces else ""
    replace = partial(replace_damaged, url, run_dir, check)
    try:
        return choose_checkpoint(run_dir, train.fallback, replace)
    except CheckpointError as error:
        raise with_copy(error, train, run_dir) from None


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


def _say(sentence: str) -> None:
    print(f"gridformer: {sentence}", file=sys.stderr, flush=True)


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
    run_dir: Path, tell: Tell = lambda doing: None, newest: int = 1
) -> Iterator[Path]:
    """Yields a run directory with its newest checkpoints, for commands that only read it.

    One that has checkpoints is read as it is, without asking its URL. If it has none, as on a
    machine that has lost them, or if it is a URL, the newest checkpoints and the small files that
    belong to a run are copied into a temporary folder.

    Args:
        run_dir: A run directory, one of its checkpoints, or a URL like `train.checkpoint_to`.
        tell: Receives progress messages.
        newest: How many of the newest checkpoints are copied if they are elsewhere.

    Raises:
        UserError: The URL cannot be used, or has no intact checkpoint.
    """
    named = url_of(run_dir)
    url = named or _said_by(run_dir)
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
            copy_side_files(run_dir, copy)
        yield copy


def _said_by(run_dir: Path) -> str | None:
    """Returns `train.checkpoint_to` of a run directory that has no checkpoint of its own."""
    if (run_dir / MANIFEST).is_file() or not (run_dir / CONFIG).is_file() or find.latest(run_dir):
        return None
    try:
        content = parse_yaml(read_text(run_dir / CONFIG))
    except (UserError, ValueError):
        return None
    train = content.get("train") if isinstance(content, dict) else None
    url = train.get("checkpoint_to") if isinstance(train, dict) else None
    return url if isinstance(url, str) and url else None
