"""Whether the kernel's out-of-memory killer has killed something, from its counters.

It kills with the same signal as `kill -9`, so only its counters tell the two apart. Those of a
process's control group count its own processes; that of the machine counts all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from gridformer.utils.units import format_bytes

_NO_LIMIT = 1 << 60  # version 1 of control groups has this or more instead of "no limit"
_NOT = (
    "but not by the kernel's out-of-memory killer, which has killed nothing meanwhile: someone, or "
    "the job's scheduler, sent it"
)


@dataclass(frozen=True)
class OomKills:
    """Counters of the out-of-memory killer.

    Attributes:
        groups: The kills in each control group of this process whose counter can be read, by the
            folder of the group.
        machine: The kills on this machine; None if that is not known.
    """

    groups: dict[Path, int] = field(default_factory=dict)
    machine: int | None = None


def count(root: Path = Path("/")) -> OomKills:
    """Returns the counters as they are now.

    Args:
        root: The folder with `proc` and `sys`.
    """
    groups = {}
    for folder in _groups(root):
        for name in ("memory.events", "memory.oom_control"):  # of versions 2 and 1
            if (kills := _kills(folder / name)) is not None:
                groups[folder] = kills
    return OomKills(groups, _kills(root / "proc/vmstat"))


def kill_cause(before: OomKills, after: OomKills) -> str:
    """Says whether a process that was killed by SIGKILL in between was killed for want of memory.

    Args:
        before: The counters before the process started.
        after: The counters after it ended.

    Returns:
        A part of a sentence; empty if the counters cannot tell.
    """
    for folder, kills in after.groups.items():
        if kills > before.groups.get(folder, kills):
            limit = limit_of(folder)
            of = f", whose limit is {format_bytes(limit)}" if limit else ""
            return f"by the kernel's out-of-memory killer, for its control group{of}"
    if None not in (before.machine, after.machine) and after.machine != before.machine:
        return "most likely by the kernel's out-of-memory killer, which has just killed a process"
    return "" if after == OomKills() else _NOT


def is_oom(cause: str) -> bool:
    """Returns whether a verdict says that memory was the reason."""
    return bool(cause) and cause != _NOT


def limit_of(folder: Path) -> int:
    """Returns the memory limit of a control group in bytes, or 0 if it has none of its own."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _read(folder / name).strip()
        if text.isdigit() and int(text) < _NO_LIMIT:
            return int(text)
    return 0


def _groups(root: Path) -> list[Path]:
    """The folders of this process's control groups that may count, the innermost first."""
    folders = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names in ("", "memory"):
            top = root / "sys/fs/cgroup" / names
            # In a container the path may be that of the host, which is not mounted here.
            folders += [top / path.lstrip("/"), top]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _kills(file: Path) -> int | None:
    kills = re.search(r"^oom_kill (\d+)$", _read(file), re.MULTILINE)
    return int(kills[1]) if kills else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
