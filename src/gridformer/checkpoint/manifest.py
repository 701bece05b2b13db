"""checkpoint.json: what a checkpoint holds, and whether its files are those that were written."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from gridformer.checkpoint.index import Index
from gridformer.config import Config, ModelConfig
from gridformer.config.renamed import with_new_names
from gridformer.utils.errors import CheckpointError

MANIFEST = "checkpoint.json"
# The folder in a run directory for files of the imported model: its config, tokenizer, generation.
KEPT = "hugging_face"


class FileEntry(Config):
    """Size and CRC-32 of one file."""

    bytes: int
    crc32: int


class Manifest(Config):
    """The content of checkpoint.json.

    Attributes:
        format: Marks the file as a gridformer checkpoint.
        version: The version of the format.
        step: How many optimizer steps were done.
        tokens: How many tokens were read.
        skipped: How many of the steps updated nothing, because float16 gradients overflowed.
        loss_scale: The loss scale of float16; see `gridformer.train.loss_scale`.
        good_steps: Steps since the loss scale last changed.
        model: The model's config.
        run: The run's config.
        files: Size and checksum of each file by name.
        index: Where the blocks are; None in checkpoints of earlier versions, whose files say it.
        data_start: The step at which the present order of samples began, see `data.restart`.
        weights_only: Whether there is no state of an optimizer, as in what
            `gridformer import` writes, so that no run can resume from it.
    """

    format: Literal["gridformer-checkpoint"]
    version: Literal[1]
    step: int
    tokens: int
    skipped: int = 0
    loss_scale: float = 1.0
    good_steps: int = 0
    model: ModelConfig
    run: dict[str, Any]
    files: dict[str, FileEntry]
    index: Index | None = None
    data_start: int = 0
    weights_only: bool = False


def read_manifest(folder: Path) -> Manifest:
    """Reads checkpoint.json from the folder of a checkpoint.

    Raises:
        CheckpointError: The file is missing, damaged, or not a checkpoint's. The message names it.
    """
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and isinstance(found.get("run"), dict):
            found["run"] = with_new_names(found["run"])
        return Manifest.model_validate(found)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a gridformer checkpoint: it has no {MANIFEST}"
        ) from None
    except (OSError, ValueError, ValidationError) as error:
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            why = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg'].lower()}"
        else:
            why = str(error)
        raise CheckpointError(
            f"{path} is damaged or not a gridformer checkpoint's ({why})"
        ) from None


def verify(folder: Path, contents: bool = True, part: int = 0, n_parts: int = 1) -> Manifest:
    """Compares the files of a checkpoint with its manifest, and returns the manifest.

    Args:
        folder: The folder of the checkpoint.
        contents: Whether to verify checksums besides sizes.
        part: With `n_parts`, which files' checksums to verify: every n_parts-th file from number
            `part` on, so that ranks can share the reading.
        n_parts: See `part`.

    Raises:
        CheckpointError: A file is missing, truncated, damaged or foreign. The message names it.
    """
    manifest = read_manifest(folder)
    remedy = (
        f"remove {folder} to resume from the checkpoint before it"
        if folder.name.startswith("step-")
        else "use another checkpoint"
    )
    for number, (name, entry) in enumerate(sorted(manifest.files.items())):
        path = folder / name
        if path.parent != folder:
            raise CheckpointError(
                f"{folder / MANIFEST} names a file outside its folder, {name}: {remedy}"
            )
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: {remedy}")
        size = path.stat().st_size
        if size != entry.bytes:
            raise CheckpointError(
                f"{path} is truncated or was changed: it has {size} bytes, but {entry.bytes} were "
                f"written; {remedy}"
            )
        if contents and number % n_parts == part and crc32_of(path) != entry.crc32:
            raise CheckpointError(f"{path} is damaged (its checksum is wrong): {remedy}")
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in manifest.files:
            raise CheckpointError(f"{path} does not belong to this checkpoint: remove that file")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes checkpoint.json, which makes a folder a checkpoint."""
    _write_synced(folder / MANIFEST, manifest.model_dump_json())


def crc32_of(path: Path) -> int:
    """Returns the CRC-32 of a file, which is read in parts."""
    crc = 0
    with path.open("rb") as file:
        read: Callable[[], bytes] = lambda: file.read(1 << 22)  # noqa: E731
        for chunk in iter(read, b""):
            crc = zlib.crc32(chunk, crc)
    return crc


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
