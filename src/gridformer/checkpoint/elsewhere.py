"""Opens the checkpoints at `train.checkpoint_to`, for commands that read a run.

A run directory that has checkpoints is read as it is, without asking any other place. If it has
none, as on a machine that has lost them, or if a URL is given in the place of a run directory, the
newest checkpoints and the small files that belong to a run are copied into a temporary folder.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import MANIFEST
from gridformer.checkpoint.remote import CONFIG, Remote, reading
from gridformer.checkpoint.side_files import copy_side_files
from gridformer.config.yaml_text import parse_yaml
from gridformer.utils.errors import CheckpointError, UserError
from gridformer.utils.files import read_text
from gridformer.utils.folders import private_prefix

# A path of the command line has lost one of the two slashes.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)
Tell = Callable[[str], None]


def url_of(path: Path) -> str | None:
    """Returns the URL that was given in the place of a path, or None if it is a path."""
    found = _URL.fullmatch(str(path))
    if found is None or path.exists():
        return None
    protocol, rest = found[1], found[2]
    root = "/" if protocol in ("file", "local") else ""
    return f"{protocol}://{root}{rest}"


@contextmanager
def run_with_checkpoints(
    run_dir: Path, tell: Tell = lambda doing: None, newest: int | None = 1
) -> Iterator[Path]:
    """Yields a run directory with its newest checkpoints, which may come from another place.

    Args:
        run_dir: A run directory, one of its checkpoints, or a URL like `train.checkpoint_to`.
        tell: Receives progress messages.
        newest: How many of the newest checkpoints are copied if they are elsewhere; None means all.

    Raises:
        CheckpointError: There is no checkpoint at the URL, or a damaged one.
        UserError: The URL cannot be used.
    """
    url = url_of(run_dir) or _said_by(run_dir)
    if url is None:
        yield run_dir
        return
    with tempfile.TemporaryDirectory(prefix=private_prefix()) as folder:
        copy = Path(folder) / "run"
        _copy(url, run_dir, copy, newest, tell)
        yield copy


def _said_by(run_dir: Path) -> str | None:
    """Returns `train.checkpoint_to` of a run directory that has no checkpoint of its own."""
    if (run_dir / MANIFEST).is_file() or not (run_dir / "config.yaml").is_file():
        return None
    if find.latest(run_dir) is not None:
        return None
    try:
        found = parse_yaml(read_text(run_dir / "config.yaml"))
    except (UserError, ValueError):
        return None
    train = found.get("train") if isinstance(found, dict) else None
    url = train.get("checkpoint_to") if isinstance(train, dict) else None
    return url if isinstance(url, str) and url else None


def _copy(url: str, run_dir: Path, copy: Path, newest: int | None, tell: Tell) -> None:
    """Copies checkpoints, and what belongs to them, into a folder that does not exist."""
    is_url = url_of(run_dir) is not None
    asked = url if is_url else f"{url} (train.checkpoint_to of {run_dir}, which has no checkpoint)"
    with reading(asked):
        remote = Remote(url)
        there = remote.complete()
        if not there:
            raise CheckpointError(
                f"there is no checkpoint at {asked}: "
                + ("name the train.checkpoint_to of the run" if is_url else "train first")
            )
        (copy / "checkpoints").mkdir(parents=True)
        for name in there[-newest:] if newest else there:
            tell(f"copying {name} from {url}")
            remote.download(name, copy / "checkpoints" / name)
        remote.download_beside(copy)
    if not is_url:
        shutil.copyfile(run_dir / CONFIG, copy / CONFIG)
        copy_side_files(run_dir, copy)
