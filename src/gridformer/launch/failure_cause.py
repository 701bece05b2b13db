"""Names what a failure is, in one sentence that comes before its traceback."""

from __future__ import annotations

import errno
import os
import re

from gridformer.utils import disk
from gridformer.utils.units import format_bytes

_ASKED_CPU = re.compile(r"you tried to allocate (\d+) bytes", re.IGNORECASE)
_ASKED_GPU = re.compile(r"Tried to allocate ([\d.]+ [KMGT]iB)")
_OF_GPU = re.compile(r"total capacity of ([\d.]+ [KMGT]iB)")
_ASKED_NUMPY = re.compile(r"Unable to allocate ([\d.]+ [KMGT]?i?B)")


def cause_of(error: BaseException) -> str:
    """Returns what an error means and what to do, or an empty text if it speaks for itself."""
    if (text := out_of_memory(error)) is not None:
        return text
    if disk.is_full(error):
        assert isinstance(error, OSError)
        return disk.full_disk_message(error) + "; free some, or choose --out on another disk"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{os.strerror(error.errno).lower()}: raise the limit, such as by `ulimit -n 4096`"
    return ""


def out_of_memory(error: BaseException) -> str | None:
    """Returns what was asked for if an error means that memory is used up, otherwise None."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch
        asked = _found(_ASKED_GPU, text)
        whole = _found(_OF_GPU, text)
        of = f" of {whole}" if whole else ""
        return f"the memory of the GPU{of} is used up" + (
            f": {asked} more were asked for" * bool(asked)
        )
    host = "the memory of this machine, or what this process may have of it, is used up"
    if found := _ASKED_CPU.search(text):
        return host + _more(format_bytes(int(found[1])))
    if isinstance(error, MemoryError):
        return host + _more(_found(_ASKED_NUMPY, text))
    return None


def _more(asked: str) -> str:
    return f": {asked} more were asked for" if asked else ""


def _found(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""
