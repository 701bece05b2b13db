"""What a run does with the copies of its checkpoints at `train.checkpoint_to`, besides saves."""

from __future__ import annotations

from pathlib import Path

from gridformer.checkpoint.manifest import STEP_FOLDER
from gridformer.checkpoint.remote import Remote
from gridformer.utils.errors import UserError


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
        "so that copies would replace its own files: name a folder outside the run directory, best "
        "on another disk, or leave train.checkpoint_to empty for no copies"
    )
