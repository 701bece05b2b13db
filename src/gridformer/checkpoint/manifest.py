"""checkpoint.json: what a checkpoint holds, and whether its files are those that were written.

The file ends with the CRC-32 of its own content, so an edited or damaged one is noticed. Everything
in it is checked before any of it is used, and nothing in it is executed.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from gridformer.checkpoint.blocks import BlockIndex
from gridformer.config import Config, ModelConfig, RunConfig
from gridformer.data.run_data import Fingerprint
from gridformer.utils.errors import CheckpointError, RemovedError, UserError
from gridformer.utils.files import UnreadableError, parse_json, read_bytes
from gridformer.utils.units import MIB

MANIFEST = "checkpoint.json"
# The folder in a run directory for files of the imported model: its config, tokenizer, generation.
KEPT = "hugging_face"
# The name of a checkpoint's folder, with its step.
STEP_FOLDER = re.compile(r"step-(\d{8,})")
# How the file ends: with the checksum of what comes before. Older versions wrote none.
_CHECKSUM = re.compile(rb',"checksum":(\d{1,10})\}\s*$')
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_LARGEST_BYTES = 4 << 30  # the index of very many ranks is large
_LARGEST_SCALE = 2.0**24  # of gridformer.train.in_flight_steps


class FileEntry(Config):
    """Size and CRC-32 of one file."""

    bytes: int = Field(ge=0)
    crc32: int = Field(ge=0, lt=1 << 32)


class Divergences(Config):
    """What `train.on_divergence` has done in a run so far."""

    in_a_row: int = Field(default=0, ge=0)  # how many of the last steps were left out
    rollbacks: int = Field(default=0, ge=0)  # how often the run went back to a checkpoint
    # The learning rate is multiplied by it since then.
    lr_factor: float = Field(default=1.0, gt=0.0, le=1.0)


class Manifest(Config):
    """The content of checkpoint.json."""

    format: Literal["gridformer-checkpoint"]
    version: Literal[1]
    step: int = Field(ge=0)  # how many optimizer steps were done
    tokens: int = Field(ge=0)  # how many tokens were read
    # How many of the steps updated nothing, because float16 gradients overflowed, or because the
    # step was not finite and was left out.
    skipped: int = Field(default=0, ge=0)
    loss_scale: float = Field(default=1.0, gt=0.0, le=_LARGEST_SCALE)
    good_steps: int = Field(default=0, ge=0)  # since the loss scale last changed
    model: ModelConfig
    run: dict[str, Any]
    files: dict[str, FileEntry]
    side_files: dict[str, FileEntry] = Field(default_factory=dict)  # such as the tokenizer
    index: BlockIndex = BlockIndex(names=[], files={})
    # The step at which the present order of samples began (`data.restart`).
    data_start: int = Field(default=0, ge=0)
    data: Fingerprint | None = None  # None in an import
    divergences: Divergences = Divergences()
    # There is no state of an optimizer, as in an import, so no run can resume from it.
    weights_only: bool = False


def read_manifest(folder: Path) -> Manifest:
    """Reads checkpoint.json from the folder of a checkpoint, and checks it as a whole.

    Raises:
        CheckpointError: The file is missing, damaged, edited, or not a checkpoint's, or contradicts
            itself or the name of its folder. The message names it.
    """
    path = folder / MANIFEST
    if not path.exists():
        if STEP_FOLDER.fullmatch(folder.name) and folder.is_dir():
            raise CheckpointError(f"{path} is missing: {damage_remedy(folder)}")
        raise CheckpointError(
            f"{folder} is not a gridformer checkpoint, because it has no {MANIFEST}: name a run "
            "directory or a folder in its checkpoints"
        )
    try:
        raw = read_bytes(path, _LARGEST_BYTES)
        content = parse_json(_with_right_checksum(raw, path))
        if isinstance(content, dict) and "checksum" in content:  # not where it was written
            raise _edited(path, "its checksum is wrong")
        manifest = Manifest.model_validate(content)
        RunConfig.model_validate(manifest.run)
    except (UnreadableError, ValueError) as error:
        why = error.reason if isinstance(error, UnreadableError) else str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            why = " ".join(f"{'.'.join(map(str, first['loc']))}: {first['msg']}".split())
            why = why.removeprefix(": ")
        raise CheckpointError(
            f"{path} is damaged or not a gridformer checkpoint's ({why}): {damage_remedy(folder)}"
        ) from None
    if problem := _contradiction(manifest):
        raise _edited(path, problem)
    named = STEP_FOLDER.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(
            f"{folder} holds step {manifest.step}, which its name does not say: rename it to "
            f"step-{manifest.step:08d}, or move it away"
        )
    return manifest


def verify_checkpoint(
    folder: Path, contents: bool = True, part: int = 0, n_parts: int = 1
) -> Manifest:
    """Compares the files of a checkpoint with its manifest, and returns the manifest.

    If `contents`, checksums and headers are verified besides sizes: those of every n_parts-th file
    from number `part` on, so that ranks can share the reading.

    Raises:
        CheckpointError: A file is missing, truncated, damaged or foreign. The message names it.
    """
    manifest = read_manifest(folder)
    names = [*sorted(manifest.files), *sorted(manifest.side_files)]
    for number, name in enumerate(names):
        path = folder / name
        if path.is_symlink() or (path.parent != folder and path.parent.is_symlink()):
            raise CheckpointError(
                f"{path} is a symbolic link, but a checkpoint has files of its own: put a copy of "
                "the file it points to in its place"
            )
        if damage := _damage(path, name, manifest, contents and number % n_parts == part):
            raise CheckpointError(f"{path} {damage} {damage_remedy(folder)}")
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in manifest.files:
            raise CheckpointError(f"{path} does not belong to this checkpoint: remove that file")
    return manifest


def _damage(path: Path, name: str, manifest: Manifest, contents: bool) -> str:
    """Returns what is wrong with a file, without a remedy; empty if it is intact."""
    entry = manifest.files.get(name) or manifest.side_files[name]
    if not path.is_file():
        return "is missing:"
    size = path.stat().st_size
    if size != entry.bytes:
        return f"is truncated or was changed: it has {size} bytes, but {entry.bytes} were written;"
    if not contents:
        return ""
    if crc32_of(path) != entry.crc32:
        return "is damaged (its checksum is wrong):"
    if name in manifest.side_files:
        return ""
    from gridformer.checkpoint.safetensors_file import positions_in

    indexed = {
        (block, tuple(offset), tuple(size))
        for number, offset, size in manifest.index.files[name]
        for block in manifest.index.names[number]
    }
    return "" if set(positions_in(path)) == indexed else f"has other blocks than {MANIFEST} says:"


def damage_remedy(folder: Path) -> str:
    """Returns what to do about a damaged checkpoint, as the end of a sentence."""
    if not STEP_FOLDER.fullmatch(folder.name):
        return "use another checkpoint"
    if _beside(folder, before=True):
        return (
            f"train.fallback=true resumes from the checkpoint before it and keeps this one aside, "
            f"as does moving {folder} elsewhere"
        )
    return "no checkpoint is before it, so restore it from a copy, or train with another --out"


def _readers_remedy(folder: Path, any_will_do: bool) -> str:
    if not STEP_FOLDER.fullmatch(folder.name):
        return "use another checkpoint"
    if not any_will_do:
        return f"restore it from a copy, or move {folder} elsewhere"
    if before := _beside(folder, before=True):
        return f"use the checkpoint before it, {before[-1]}"
    if after := _beside(folder, before=False):
        return f"use the checkpoint after it, {after[0]}"
    return "there is no other checkpoint, so restore it from a copy"


def _beside(folder: Path, before: bool) -> list[Path]:
    """Returns the checkpoints before or after one in its folder, in their order."""
    there = sorted(one for one in folder.parent.iterdir() if STEP_FOLDER.fullmatch(one.name))
    return [one for one in there if one != folder and (one.name < folder.name) == before]


@contextmanager
def advice_for_readers(folder: Path, any_will_do: bool = True) -> Iterator[None]:
    """Makes errors in the block about a damaged checkpoint advise a command that does not train.

    `train.fallback` is of no use to it, and if not `any_will_do` neither is another checkpoint. If
    a run beside it has removed the checkpoint, the error is a RemovedError.
    """
    try:
        yield
    except (UserError, OSError, RuntimeError) as error:  # safetensors raises the last
        if not folder.exists():
            raise removed_error(folder) from None
        if not isinstance(error, CheckpointError):
            raise
        text = str(error)
        raise CheckpointError(
            text.replace(damage_remedy(folder), _readers_remedy(folder, any_will_do))
        ) from None


def removed_error(folder: Path) -> RemovedError:
    """Returns the error about a checkpoint that is no longer there."""
    return RemovedError(
        f"{folder} is no longer there: a run that goes on keeps only its newest checkpoints "
        f"(train.keep_checkpoints), so run the command again, with {folder.parent.parent}"
    )


def _edited(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or was edited ({why}): {damage_remedy(path.parent)}")


def _with_right_checksum(raw: bytes, path: Path) -> bytes:
    """Returns the content of a manifest without its checksum, which must be right."""
    written = _CHECKSUM.search(raw[-40:])
    if not written:
        return raw
    content = raw[: len(raw) - len(written[0])] + b"}"
    if zlib.crc32(content) != int(written[1]):
        raise _edited(path, "its checksum is wrong")
    return content


def _contradiction(manifest: Manifest) -> str | None:
    """Returns how the values of a manifest, each valid by itself, contradict each other, if so."""
    for key in ("skipped", "data_start"):
        if getattr(manifest, key) > manifest.step:
            return f"{key} is {getattr(manifest, key)}, and step only {manifest.step}"
    if RunConfig.model_validate(manifest.run).model != manifest.model:
        return "model and run.model are different models"
    for name in manifest.files:
        if not _PLAIN.fullmatch(name):
            return f"files: {json.dumps(name)} is not the plain name of a file in its folder"
    for name in manifest.side_files:
        if not _PLAIN.fullmatch(name.removeprefix(f"{KEPT}/")) or name in manifest.files:
            return f"side_files: {json.dumps(name)} is not the name of a small file in its folder"
    if not manifest.files:
        return "files: there are none"
    model, n_bytes = manifest.model, sum(entry.bytes for entry in manifest.files.values())
    table = model.max_seq_len * model.hidden_size if model.family in ("gpt2", "bert") else 0
    if (least := model.matrix_elements + table) > n_bytes + MIB:
        return f"model has {least:,} parameters or more, and files only {n_bytes:,} bytes"
    index = manifest.index
    if set(index.files) != set(manifest.files):
        odd = sorted(set(index.files) ^ set(manifest.files))
        return f"files and index do not name the same files, see {odd[0]}"
    for file, positions in index.files.items():
        for number, offset, size in positions:
            if not 0 <= number < len(index.names):
                return f"index: {file} has list {number} of {len(index.names)}"
            if len(offset) != len(size) or min((*offset, *size), default=0) < 0:
                return f"index: {file} has a block at {offset} of size {size}"
    return None


def manifest_bytes(manifest: Manifest) -> bytes:
    """Returns the content of checkpoint.json, with its checksum."""
    text = manifest.model_dump_json()
    checksum = zlib.crc32(text.encode("utf-8"))
    return f'{text[:-1]},"checksum":{checksum}}}'.encode()


def crc32_of(path: Path) -> int:
    """Returns the CRC-32 of a file, which is read in parts."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(4 * MIB):
            crc = zlib.crc32(chunk, crc)
    return crc
