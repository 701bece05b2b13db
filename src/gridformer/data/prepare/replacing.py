"""A folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from gridformer.data.tokenfolder import FILES, INDEX, is_token_folder
from gridformer.utils.errors import UserError
from gridformer.utils.folders import begin_folder, finish_folder, hidden_folder


def check_free(out: Path, overwrite: bool) -> None:
    """Raise UserError unless `out` may be written: absent, empty, or a token folder to overwrite.

    A folder that holds anything but a token folder's own files is never replaced.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out}: is a file; choose another --out")
    present = {path.name for path in out.iterdir()}
    if not present:
        return
    if foreign := sorted(present - FILES):
        raise UserError(
            f"{out}: holds {', '.join(foreign[:3])}, which prepare did not write, and is not "
            f"replaced; choose another --out"
        )
    if not is_token_folder(out):
        raise UserError(
            f"{out}: is not empty, and its {INDEX} does not make it a token folder, so it is not "
            f"replaced; choose another --out"
        )
    if not overwrite:
        raise UserError(f"{out}: holds a token folder already; add --overwrite to replace it")


@contextlib.contextmanager
def written_whole(out: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside `out` that takes its place when the block ends without an error.

    After an error or Ctrl-C it is removed. A process that is killed leaves it behind, hidden and
    without an index, so that it cannot be taken for a token folder.
    """
    check_free(out, overwrite)
    target = out.resolve()  # a link stays a link, and the folder beside its target can be renamed
    # A name that is drawn: several may write the same folder at a time.
    writing = hidden_folder(target, f"-{secrets.token_hex(4)}")
    begin_folder(writing)
    try:
        yield writing
        check_free(out, overwrite)  # much may have happened since
        finish_folder(writing, target)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
