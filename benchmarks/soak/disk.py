"""A small disk that can be filled: a file system in memory, of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SIZE_MIB = 64


@dataclass(frozen=True)
class Disk:
    """Where runs write.

    Attributes:
        folder: Its root.
        small: Whether it can be filled; mounting one takes rights that not every user has.
    """

    folder: Path
    small: bool

    def fill(self, but: int) -> None:
        """Leaves only `but` bytes free."""
        size = 1 << 16
        with (self.folder / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    size = file.write(bytes(size)) or 0
            except OSError:
                file.truncate(max(0, file.tell() - but))

    def free(self) -> None:
        """Removes what has filled it."""
        (self.folder / "filler").unlink(missing_ok=True)


@contextmanager
def disk(folder: Path) -> Iterator[Disk]:
    """Mounts a small disk at a folder, or takes the folder as it is if that is not allowed."""
    folder.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE_MIB}m", "tmpfs", str(folder)]
    try:
        small = subprocess.run(words, capture_output=True, check=False).returncode == 0
    except OSError:
        small = False
    try:
        yield Disk(folder, small)
    finally:
        if small:
            subprocess.run(["umount", str(folder)], check=False)
