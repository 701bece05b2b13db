"""Full disks: which errors mean one, and a sentence with what was needed and what is free."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gridformer.utils.units import format_bytes

_WHY = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "this user's quota on the disk is used up",
    errno.EFBIG: "the file is larger than this process or the disk allows (see `ulimit -f`)",
}


class FullDiskError(OSError):
    """A file that could not be written because there is no space left for it.

    Args:
        number: The number of the system's error.
        path: The file.
        n_bytes: How much was to be written; 0 if that is not known.
    """

    def __init__(self, number: int, path: Path, n_bytes: int = 0) -> None:
        super().__init__(number, os.strerror(number), str(path))
        self.n_bytes = n_bytes

    def __str__(self) -> str:
        return full_disk_message(self)


def is_full(error: BaseException) -> bool:
    """Returns whether an error means that there is no space left."""
    return isinstance(error, OSError) and error.errno in _WHY


@contextmanager
def writing(path: Path, n_bytes: int = 0) -> Iterator[None]:
    """Lets a full disk inside the block raise an error that names the file.

    The system's own errors name no file when one that is open is written.

    Args:
        path: The file that is written.
        n_bytes: How much is to be written; 0 if that is not known.

    Raises:
        FullDiskError: There is no space left.
    """
    try:
        yield
    except FullDiskError:
        raise
    except OSError as error:
        if not is_full(error):
            raise
        raise FullDiskError(error.errno or errno.ENOSPC, path, n_bytes) from None


def leave_to_callers() -> None:
    """Keeps threads from printing a traceback because a disk is full.

    The thread that writes TensorBoard's events passes the error on to the next caller that writes
    or closes, which reports it; the thread would print the same error between other lines.
    """
    before = threading.excepthook

    def quiet(args: threading.ExceptHookArgs) -> None:
        if not (args.exc_value and is_full(args.exc_value)):
            before(args)

    threading.excepthook = quiet


def full_disk_message(error: OSError) -> str:
    """Returns the message about a full disk, without a period at the end."""
    number = error.errno or errno.ENOSPC
    text = _WHY.get(number, os.strerror(number))
    if error.filename is None:
        return f"{text}: a file could not be written"
    path = Path(os.fsdecode(error.filename))
    needed = getattr(error, "n_bytes", 0)
    text += f": {path} could not be written"
    said = [f"{format_bytes(needed)} were to be written"] if needed else []
    folder = next((parent for parent in path.parents if parent.is_dir()), None)
    if folder is not None:
        said.append(f"{format_bytes(shutil.disk_usage(folder).free)} are free there")
    return text + (f" ({', '.join(said)})" if said else "")
