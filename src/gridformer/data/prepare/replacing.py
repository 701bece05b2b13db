"""Writes a token folder so that it appears complete or not at all."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from gridformer.data.tokenfolder import INDEX, is_own_file, is_token_folder
from gridformer.utils.errors import UserError
from gridformer.utils.folders import begin_folder, finish_folder, hidden_folder


def check_free(out: Path, overwrite: bool) -> None:
    """Checks that `out` may be written: it is absent, empty, or a token folder to overwrite.

    A folder that contains anything but a token folder's own files is never replaced.

    Raises:
        UserError: `out` may not be written.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out}: is a file; choose another --out")
    present = {path.name for path in out.iterdir()}
    if not present:
        return
    if foreign := sorted(name for name in present if not is_own_file(name)):
        raise UserError(
            f"{out}: holds {', '.join(foreign[:3])}, which prepare did not write, so it is not "
            f"replaced; choose another --out"
        )
    if not is_token_folder(out):
        raise UserError(
            f"{out}: is not empty, and its {INDEX} does not make it a token folder, so it is not "
            f"replaced; choose another --out"
        )
    if not overwrite:
        raise UserError(f"{out}: already is a token folder; add --overwrite to replace it")


@contextlib.contextmanager
def written_whole(out: Path, overwrite: bool) -> Iterator[Path]:
    """Yields a temporary folder that replaces `out` when the block ends without an error.

    After an error or Ctrl-C the folder is removed. A process that is killed leaves it behind,
    hidden and without an index, so that it cannot be mistaken for a token folder.

    Raises:
        UserError: `out` may not be written; see `check_free`.
    """
    check_free(out, overwrite)
    target = out.resolve()  # keeps a link, and allows renaming a folder beside its target
    # The name is random because several processes may write the same folder at a time.
    writing = hidden_folder(target, f"-{secrets.token_hex(4)}")
    begin_folder(writing)
    try:
        yield writing
        check_free(out, overwrite)  # it may have changed since the first check
        finish_folder(writing, target)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
