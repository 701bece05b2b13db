"""Reads small text files that a user names: settings, indexes, prompts.

The file may be missing, or it may be a folder, a pipe that nobody writes to, an endless device, or
far larger than such a file should be. Each of these is refused with one sentence, without waiting
for a pipe and without reading a device or the rest of a large file.
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
    """A file that cannot be read.

    Args:
        path: The file.
        reason: Why, as a part of a sentence.
    """

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
    """Returns the path beside a missing one that is called nearly so, for the error about it.

    Args:
        path: The path that is missing.
        fits: Whether what is beside it could be meant.
    """
    with contextlib.suppress(OSError, ValueError):  # the folder may be missing as well
        beside = {other.stem: other for other in path.parent.iterdir() if fits(other)}
        names = difflib.get_close_matches(path.stem, beside, n=1, cutoff=0.7)
        return str(beside[names[0]]) if names else ""
    return ""


def tokens_exist(path: Path) -> bool:
    """Returns whether there is a token source at a path: PREFIX stands for PREFIX.bin as well."""
    return exists(path) or exists(path.with_name(f"{path.name or '.'}.bin"))


def check_output(option: str, path: Path, inputs: Iterable[Path | str] = ()) -> None:
    """Refuses an output file that could not be written, before the work on its content begins.

    It makes the folder of the file if there is none.

    Args:
        option: The option that names the file, for the message.
        path: The file.
        inputs: The files that the command reads, which the output must not replace. Names that are
            not files are ignored.

    Raises:
        UserError: It is a folder, a device or an input, or it or its folder cannot be written.
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
    """Returns the content of a file that is meant to be small.

    Args:
        path: The file.
        at_most: The most bytes that it may have.

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
    """Returns what `read_bytes` does, but raises OSError, which tells a missing file from others.

    Raises:
        OSError: It is missing, not a file, too large, or the system refuses to read it.
    """
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
            return file.read(
                max(status.st_size, MIB)
            )  # files of the system say that they are empty
    finally:
        os.close(descriptor)


def read_text(path: Path, at_most: int = 64 * MIB) -> str:
    """Returns the text of a file in UTF-8; see `read_bytes`.

    Raises:
        UnreadableError: It cannot be read, or is not UTF-8.
    """
    try:
        return read_bytes(path, at_most).decode("utf-8-sig")  # a byte order mark is not text
    except UnicodeDecodeError as error:
        raise UnreadableError(path, f"it is not UTF-8 text (byte {error.start})") from None


def read_json(path: Path, at_most: int = 64 * MIB) -> Any:
    """Returns the value of a file of JSON; see `read_bytes`.

    Raises:
        UnreadableError: It cannot be read, or is not JSON.
    """
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


@contextlib.contextmanager
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
