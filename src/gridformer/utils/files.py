"""Reads small text files that a user names, checks files to be written, and names full disks.

A named file may be missing, a folder, a pipe that nobody writes to, an endless device, or far too
large. Each is refused with one sentence, without waiting for a pipe or reading a device.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gridformer.utils.errors import UserError
from gridformer.utils.units import MIB, format_bytes


class UnreadableError(UserError):
    """A file that cannot be read, for a reason that is a part of a sentence."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: cannot be read ({reason})")

    def __reduce__(self) -> tuple[type[UnreadableError], tuple[Path, str]]:
        return UnreadableError, (self.path, self.reason)


def exists(path: Path) -> bool:
    """Returns whether there is something at a path; False also if it is not a possible path."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, a folder that is closed, or NUL
        return False


def meant_beside(path: Path, fits: Callable[[Path], object]) -> str:
    """Returns the path beside a missing one that `fits` and is called nearly so; "" if none is."""
    with contextlib.suppress(OSError, ValueError):  # the folder may be missing as well
        beside = {other.stem: other for other in path.parent.iterdir() if fits(other)}
        names = difflib.get_close_matches(path.stem, beside, n=1, cutoff=0.7)
        return str(beside[names[0]]) if names else ""
    return ""


def check_output(option: str, path: Path, inputs: Iterable[Path | str] = ()) -> None:
    """Checks that an option's output file can be written, and makes its folder if there is none.

    Raises:
        UserError: It is a folder, a device or one of the inputs, or it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = path.stat().st_mode if exists(path) else stat.S_IFREG
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"{option} {path}: the folder {path.parent} cannot be made ({reason})"
        ) from None
    if stat.S_ISDIR(mode):
        raise UserError(f"{option} {path}: is a folder; name a file in it")
    if not stat.S_ISREG(mode):
        raise UserError(f"{option} {path}: is {_kind(mode)}; name a file")
    if any(exists(Path(one)) and exists(path) and path.samefile(one) for one in inputs if one):
        raise UserError(f"{option} {path}: is an input of this command; name another file")
    if not os.access(path if exists(path) else path.parent, os.W_OK):
        raise UserError(f"{option} {path}: may not be written by this user")


def read_bytes(path: Path, at_most: int = 64 * MIB) -> bytes:
    """Returns the content of a file of at most that number of bytes.

    Raises:
        UnreadableError: It is missing, not a file, too large, or the system refuses to read it.
    """
    try:
        return regular_bytes(path, at_most)
    except OSError as error:
        raise UnreadableError(path, error.strerror or str(error)) from None
    except ValueError:  # NUL in the path
        raise UnreadableError(path, "a path cannot contain NUL") from None


def regular_bytes(path: Path, at_most: int) -> bytes:
    """Returns what `read_bytes` does, but raises OSError, which tells why it cannot be read."""
    # Without O_NONBLOCK, opening a pipe would wait for someone who writes into it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status, why = os.fstat(descriptor), ""
        if not stat.S_ISREG(status.st_mode):
            why = f"it is {_kind(status.st_mode)}, not a file"
        elif status.st_size > at_most:
            why = f"it has more than {format_bytes(at_most)}, the most that is read of such a file"
        if why:
            raise OSError(errno.EINVAL, why, str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            # Files of the system say that they are empty.
            return file.read(max(status.st_size, MIB))
    finally:
        os.close(descriptor)


def read_text(path: Path, at_most: int = 64 * MIB) -> str:
    """Returns the text of a small file; UnreadableError also if it is not UTF-8."""
    try:
        return read_bytes(path, at_most).decode("utf-8-sig")  # a byte order mark is not text
    except UnicodeDecodeError as error:
        raise UnreadableError(path, f"it is not UTF-8 text (byte {error.start})") from None


def read_json(path: Path, at_most: int = 64 * MIB) -> Any:
    """Returns the value of a small file of JSON; UnreadableError also if it is not JSON."""
    text = read_text(path, at_most)
    try:
        return parse_json(text)
    except ValueError as error:
        raise UnreadableError(path, f"it is not JSON: {error}") from None


def parse_json(text: str | bytes) -> Any:
    """Parses JSON.

    Raises:
        ValueError: It is not JSON, nests too deep, repeats a key, or has a number of thousands of
            digits. The message is a part of a sentence.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in mapping if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:40]!r} occurs twice")
    return mapping


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


_WHY = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "this user's quota on the disk is used up",
    errno.EFBIG: "the file is larger than this process or the disk allows (see `ulimit -f`)",
}


class FullDiskError(OSError):
    """A file that could not be written because there is no space left for it."""

    def __init__(self, number: int, path: Path, n_bytes: int = 0) -> None:
        super().__init__(number, os.strerror(number), str(path))
        self.n_bytes = n_bytes  # how much was to be written; 0 if that is not known

    def __str__(self) -> str:
        return full_disk_message(self)


def is_full(error: BaseException) -> bool:
    """Returns whether an error means that there is no space left."""
    return isinstance(error, OSError) and error.errno in _WHY


@contextlib.contextmanager
def writing(path: Path, n_bytes: int = 0) -> Iterator[None]:
    """Lets a full disk inside the block raise an error that names the file, as the system's do not.

    Args:
        path: The file that is written.
        n_bytes: How much is to be written; 0 if that is not known.

    Raises:
        FullDiskError: There is no space left.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, FullDiskError) or not is_full(error):
            raise
        raise FullDiskError(error.errno or errno.ENOSPC, path, n_bytes) from None


def leave_to_callers() -> None:
    """Keeps TensorBoard's thread from printing a full disk's traceback, which callers report."""
    before = threading.excepthook

    def quiet(args: threading.ExceptHookArgs) -> None:
        if not (args.exc_value and is_full(args.exc_value)):
            before(args)

    threading.excepthook = quiet


def full_disk_message(error: OSError) -> str:
    """Returns the message about a full disk, without a period at the end."""
    text = _WHY[error.errno or errno.ENOSPC]
    if error.filename is None:
        return f"{text}: a file could not be written"
    path = Path(os.fsdecode(error.filename))
    needed = getattr(error, "n_bytes", 0)
    facts = [f"{format_bytes(needed)} were to be written"] if needed else []
    folder = next((parent for parent in path.parents if parent.is_dir()), None)
    if folder is not None:
        facts.append(f"{format_bytes(shutil.disk_usage(folder).free)} are free there")
    text += f": {path} could not be written"
    return text + (f" ({', '.join(facts)})" if facts else "")
