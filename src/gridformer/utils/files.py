"""Small files that a user names, files to be written, full disks, and folders that are atomic.

A named file may be missing, a folder, a pipe that nobody writes to, an endless device, or far too
large. Each is refused with one sentence, without waiting for a pipe or reading a device.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gridformer.utils.errors import UserError
from gridformer.utils.units import MIB, format_bytes

_WRITING, _REPLACED, _DELETING = ".writing-", ".replaced-", ".deleting-"
_PRIVATE = "gridformer-"


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
    """Lets errors of writing inside the block name the file, as the system's do not.

    Args:
        path: The file that is written.
        n_bytes: How much is to be written; 0 if that is not known.

    Raises:
        FullDiskError: There is no space left.
        OSError: Something else failed.
    """
    try:
        yield
    except OSError as error:
        if not is_full(error) and error.errno and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from None
        if isinstance(error, FullDiskError) or not is_full(error):
            raise
        raise FullDiskError(error.errno or errno.ENOSPC, path, n_bytes) from None


def write_text(path: Path, text: str, errors: str = "strict") -> None:
    """Writes a text file in UTF-8, whose name is in every error."""
    with writing(path):
        path.write_text(text, encoding="utf-8", errors=errors)


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


def hidden_folder(target: Path, suffix: str = "") -> Path:
    """Returns the hidden path beside `target` at which it is written until it is complete."""
    return target.with_name(f"{_WRITING}{target.name}{suffix}")


def begin_folder(hidden: Path) -> None:
    """Creates an empty hidden folder, removing what a killed process left at this path."""
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)


def finish_folder(hidden: Path, target: Path) -> None:
    """Renames a hidden folder to its final name, replacing any folder there.

    Raises:
        OSError: Renaming failed; a previous folder at `target` is then still there.
    """
    sync_folder(hidden)
    # If a crash between the two renames leaves no folder, `remove_leftovers` puts the old one back.
    old = _gone(target, _REPLACED)
    replaces = target.exists()
    if replaces:
        target.rename(old)
    try:
        hidden.rename(target)
    except BaseException:
        if replaces:
            old.rename(target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields a hidden folder that becomes `out` when the block ends, and is removed on an error.

    Raises:
        UserError: There already is something at `out`, before or after the block.
    """
    refuse_existing(out)
    target = out.resolve()
    # The name is random because several processes may write the same folder at a time.
    hidden = hidden_folder(target, f"-{secrets.token_hex(4)}")
    begin_folder(hidden)
    try:
        yield hidden
        refuse_existing(out)
        finish_folder(hidden, target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def refuse_existing(out: Path) -> None:
    """Raises UserError if there already is something at `out`."""
    if out.exists() or out.is_symlink():
        raise UserError(f"{out}: already exists, and is not replaced; choose another --out")


def remove_folder(folder: Path) -> None:
    """Removes a folder atomically: it is renamed first, so no part of it is left under its name."""
    gone = _gone(folder)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Removes folders that a killed process had begun to write, to replace or to remove.

    A folder that was to be replaced is put back if there is none in its place. Nobody may be
    writing there.
    """
    for old in parent.glob(f"{_REPLACED}*"):
        target = old.with_name(old.name.removeprefix(_REPLACED).rpartition("-")[0])
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)
    for prefix in (_DELETING, _WRITING):
        for leftover in parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def private_prefix() -> str:
    """Returns the prefix of the names of this process's temporary folders."""
    return f"{_PRIVATE}{os.getpid()}.{_process_numbers()}-"


def remove_private_leftovers(parent: Path | None = None) -> None:
    """Removes temporary folders of this user's processes that were killed, by default in TMPDIR."""
    parents = [parent] if parent else {Path(tempfile.gettempdir()), Path("/tmp")}
    for folder in (folder for where in parents for folder in where.glob(f"{_PRIVATE}*")):
        pid, _, numbers = folder.name.removeprefix(_PRIVATE).partition("-")[0].partition(".")
        if not pid.isdecimal() or numbers != _process_numbers() or _runs(int(pid)):
            continue
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def _process_numbers() -> str:
    """Names the PID namespace: containers that share a folder may number their processes apart."""
    try:
        return "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
    except OSError:
        return "0"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is another user's
    return True


def sync_folder(folder: Path) -> None:
    """Waits until the directory entries of a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _gone(folder: Path, prefix: str = _DELETING) -> Path:
    """Returns a hidden path to which a folder is renamed before it is removed."""
    return folder.with_name(f"{prefix}{folder.name}-{secrets.token_hex(4)}")
