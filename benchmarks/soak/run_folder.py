"""A run directory as the soak looks at it, and damages it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_STEP = re.compile(r"step-\d{8}")
_LINE = re.compile(r'^\{"step": (\d+)', re.MULTILINE)
_OWN_FILES = re.compile(
    r"checkpoints|config\.yaml|events\.jsonl|heartbeat\.json|loss\.png|metrics\.jsonl|tensorboard|"
    r"tokenizer\.json|hang-[\d-]+\.json"
)


@dataclass(frozen=True)
class RunFolder:
    """What a run directory says of a run."""

    path: Path

    def done(self) -> int:
        """Returns the last step in metrics.jsonl; 0 if there is none."""
        try:
            found = _LINE.findall((self.path / "metrics.jsonl").read_text())
        except OSError:
            return 0
        return int(found[-1]) if found else 0

    def checkpoints(self) -> list[Path]:
        """Returns the complete checkpoints, oldest first."""
        folder = self.path / "checkpoints"
        names = os.listdir(folder) if folder.exists() else []
        return [folder / name for name in sorted(names) if _STEP.fullmatch(name)]

    def unfinished(self) -> set[str]:
        """Returns what no start may leave that has ended by itself: its lock, hidden folders."""
        found = {path.name for path in (self.path / "checkpoints").glob(".*")}
        return found | {path.name for path in self.path.glob("lock")}

    def foreign(self) -> set[str]:
        """Returns what no run directory has."""
        names = os.listdir(self.path) if self.path.exists() else ["nothing"]
        return {name for name in names if not _OWN_FILES.fullmatch(name)}


def number_of(checkpoint: Path) -> int:
    """Returns the step of a checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def damage(checkpoint: Path, how: str, part: float) -> None:
    """Damages one file of a checkpoint.

    Args:
        how: "flip" a bit, "truncate" or "remove" it.
        part: Which file, bit and size, as a fraction of their number.
    """
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    path = files[int(part * len(files))]
    size = path.stat().st_size
    if how == "remove":
        path.unlink()
    elif how == "truncate":
        os.truncate(path, int(size * part))
    else:
        at = int(part * 8 * size)
        content = bytearray(path.read_bytes())
        content[at // 8] ^= 1 << at % 8
        path.write_bytes(content)
