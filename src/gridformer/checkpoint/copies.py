"""What a run does with the copies of its checkpoints at `train.checkpoint_to`, apart from saves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gridformer.checkpoint.fallback import ChosenCheckpoint, Damaged, choose_checkpoint, set_aside
from gridformer.checkpoint.find import complete
from gridformer.checkpoint.manifest import (
    STEP_FOLDER,
    Manifest,
    damage_remedy,
    verify_checkpoint,
)
from gridformer.checkpoint.outcome import Kept, step_of
from gridformer.checkpoint.remote import Remote
from gridformer.config import TrainConfig
from gridformer.utils.errors import CheckpointError, UserError


def clash(url: str, run_dir: Path) -> str:
    """Says why copies at a URL would replace or remove what a run itself has written.

    Args:
        url: The URL of `train.checkpoint_to`.
        run_dir: The run directory, which need not exist yet.

    Returns:
        A sentence with what would work; empty if they would not, or if the URL cannot be used.
    """
    try:
        folder = Remote(url).local
    except UserError:  # which is said when the URL is used
        return ""
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


def copy_newest(train: TrainConfig, run_dir: Path) -> str:
    """Copies the newest intact checkpoint of a run to `checkpoint_to`, unless one as new is there.

    A copy may have failed, or the run may have been killed while it copied. Contents are verified
    first, so nothing is read if there is nothing to copy.

    Args:
        train: The settings of the run. Nothing is done if `checkpoint_to` is empty.
        run_dir: The run directory.

    Returns:
        Why the newest checkpoint is not there; empty if it is, or if there is none.
    """
    folders, damage = complete(run_dir)[::-1], ""
    if not train.checkpoint_to or not folders:
        return ""
    try:
        remote = Remote(train.checkpoint_to)
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


def replace_damaged(
    url: str,
    run_dir: Path,
    check: Callable[[Manifest], None],
    damaged: Sequence[Damaged],
    before: Path | None,
) -> Path | None:
    """Replaces damaged checkpoints of a run by the newest intact copy at a URL.

    Those that are as new as the copy are set aside, once it is verified. A line on standard error
    says so, or why a copy cannot be used.

    Args:
        url: The URL of `train.checkpoint_to`; nothing is done if it is empty.
        run_dir: The run directory.
        check: Raises a CheckpointError if a checkpoint with this manifest must not be copied.
        damaged: The newest checkpoints, newest first.
        before: The checkpoint before them; None if there is none. Only a newer copy is used.

    Returns:
        The folder of the copy; None if there is none that is newer and intact.
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
        remote = Remote(url)
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
    train: TrainConfig, run_dir: Path, check: Callable[[Manifest], None], replaces: bool = True
) -> ChosenCheckpoint | None:
    """Finds the checkpoint to resume from, as `choose_checkpoint` does; it may become a copy.

    Args:
        train: The settings of the run.
        run_dir: The run directory.
        check: See `replace_damaged`.
        replaces: Whether damaged checkpoints may be replaced now.

    Raises:
        CheckpointError: See `choose_checkpoint`. It names a copy that can be used instead.
    """
    url = train.checkpoint_to if replaces else ""

    def replace(damaged: Sequence[Damaged], before: Path | None) -> Path | None:
        return replace_damaged(url, run_dir, check, damaged, before)

    try:
        return choose_checkpoint(run_dir, train.fallback, replace)
    except CheckpointError as error:
        raise with_copy(error, train, run_dir) from None


def with_copy(error: CheckpointError, train: TrainConfig, run_dir: Path) -> CheckpointError:
    """Returns an error that also names the copy which can replace a damaged newest checkpoint.

    Args:
        error: What is wrong with the newest checkpoint of a run.
        train: The settings of the run.
        run_dir: The run directory.

    Returns:
        The error itself if there is no such copy, or if it is used without being asked for.
    """
    *older, newest = [None, *complete(run_dir)]
    if newest is None or not train.checkpoint_to or train.fallback:
        return error
    remedy = damage_remedy(newest)
    if remedy not in str(error):
        return error
    try:
        there = Remote(train.checkpoint_to).complete()
    except Exception:  # the damage is what must be said
        return error
    before = older[-1]
    if not there or (before and step_of(there[-1]) <= step_of(before.name)):
        return error
    instead = (
        f"{train.checkpoint_to.rstrip('/')}/{there[-1]} is a copy: train.fallback=true verifies "
        f"it, resumes from it and keeps the damaged one aside, as does moving {newest} elsewhere"
    )
    return CheckpointError(str(error).replace(remedy, instead))


def _say(sentence: str) -> None:
    print(f"gridformer: {sentence}", file=sys.stderr, flush=True)
