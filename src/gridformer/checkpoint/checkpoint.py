"""Checkpoints: layout-free, written atomically, verified before they are loaded.

    RUNDIR/checkpoints/step-00000100/
        shard-*.safetensors     blocks of parameters and of the optimizer's two moments
        checkpoint.json         written last: step, model, training settings, files with checksums

A checkpoint is written into a hidden folder and renamed when complete, so a folder with a plain
name is whole, and a crash leaves the one before as it was. All a run's state besides tensors is
its step, and float16's loss scale: data order, learning rate and dropout masks are functions of
(seed, step).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from gridformer import comm
from gridformer.config import Config, ModelConfig, RunConfig
from gridformer.config.renamed import with_new_names
from gridformer.mesh import Axes
from gridformer.parallel.data.gradients import owned
from gridformer.parallel.data.zero import stored
from gridformer.parallel.sharding import ParamShard, shard_of
from gridformer.utils.errors import CheckpointError
from gridformer.utils.folders import (
    begin_folder,
    finish_folder,
    hidden_folder,
    remove_folder,
    remove_leftovers,
)

MANIFEST = "checkpoint.json"
# Of a model, between two runs.
_MAY_CHANGE = ("name", "dropout", "attention_dropout", "label_smoothing")
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer(Protocol):
    """What is saved of an optimizer, and made before it is loaded."""

    @property
    def state(self) -> Mapping[nn.Parameter, Mapping[str, Tensor]]:
        """The moments of each parameter that this rank updates, by name."""

    def allocate(self, step: int) -> None:
        """Make the state of an optimizer that has made so many updates, to be filled."""


class Scale(Protocol):
    """What is saved of a loss scale; see gridformer.train.loss_scale."""

    scale: float
    good: int
    skipped: int


class FileEntry(Config):
    """Size and CRC-32 of one file."""

    bytes: int
    crc32: int


class Manifest(Config):
    """What checkpoint.json holds. `step` optimizer steps were done when it was written, of which
    `skipped` updated nothing. loss_scale, good_steps: see gridformer.train.loss_scale; float16's.
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


def latest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run directory, or None."""
    found = _complete(run_dir)
    return found[-1] if found else None


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError, with the file's name, where it is missing, foreign or damaged."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and isinstance(found.get("run"), dict):
            found["run"] = with_new_names(found["run"])
        return Manifest.model_validate(found)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is no gridformer checkpoint: it has no {MANIFEST}"
        ) from None
    except (OSError, ValueError, ValidationError) as error:
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            why = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg'].lower()}"
        else:
            why = str(error)
        raise CheckpointError(f"{path} is damaged or foreign ({why})") from None


def verify(folder: Path, contents: bool = True, part: int = 0, n_parts: int = 1) -> Manifest:
    """Compare a checkpoint's files with its manifest; returns the manifest.

    contents: checksum them, not only their sizes; of every n_parts-th file from number `part` on,
    so that ranks can share the reading. Raises CheckpointError that names the file.
    """
    manifest = read_manifest(folder)
    remedy = (
        f"remove {folder} to go on from the checkpoint before it"
        if folder.name.startswith("step-")
        else "use another checkpoint"
    )
    for number, (name, entry) in enumerate(sorted(manifest.files.items())):
        path = folder / name
        if path.parent != folder:
            raise CheckpointError(f"{folder / MANIFEST} names a file outside its folder: {name}")
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: {remedy}")
        size = path.stat().st_size
        if size != entry.bytes:
            raise CheckpointError(
                f"{path} is truncated or was changed: {size} bytes where {entry.bytes} were "
                f"written; {remedy}"
            )
        if contents and number % n_parts == part and _crc32(path) != entry.crc32:
            raise CheckpointError(f"{path} is damaged (its checksum is wrong): {remedy}")
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in manifest.files:
            raise CheckpointError(f"{path} does not belong to this checkpoint: remove that file")
    return manifest


def check_same_run(manifest: Manifest, run: RunConfig, folder: Path) -> None:
    """Raise CheckpointError unless `run` continues the run that wrote the checkpoint.

    Layout, schedule and what is reported may change; what the model and the order of its data
    depend on may not.
    """
    wanted = run.model_dump(mode="json")
    keys = [("model", key) for key in wanted["model"] if key not in _MAY_CHANGE]
    keys += [("train", "seed"), ("train", "global_batch")]
    keys += [("data", key) for key in ("task", "seq_len", "source_len")]
    differences = [
        f"{section}.{key} is {wanted[section][key]}, there {manifest.run[section][key]}"
        for section, key in keys
        if manifest.run.get(section, {}).get(key) != wanted[section][key]
        and key in manifest.run.get(section, {})
    ]
    if differences:
        raise CheckpointError(
            f"{folder} is of another run ({'; '.join(differences)}): give this one its own --out"
        )


def save(
    run_dir: Path,
    step: int,
    tokens: int,
    run: RunConfig,
    model: nn.Module,
    optimizer: Optimizer,
    axes: Axes,
    scale: Scale | None = None,
) -> Path:
    """Write a checkpoint of `step` done steps, on all ranks together; returns its folder."""
    from gridformer.checkpoint.blocks_io import (
        write_blocks,  # takes time, of commands that write none
    )

    final = run_dir / "checkpoints" / f"step-{step:08d}"
    writing = hidden_folder(final)
    first = axes.world.index == 0
    if first:
        begin_folder(writing)
    comm.barrier((axes.world,))
    write_blocks(_shards(model, optimizer), writing)
    files = _file_entries(writing, axes)
    if first:
        manifest = Manifest(
            format="gridformer-checkpoint",
            version=1,
            step=step,
            tokens=tokens,
            skipped=scale.skipped if scale else 0,
            loss_scale=scale.scale if scale else 1.0,
            good_steps=scale.good if scale else 0,
            model=run.model,
            run=run.model_dump(mode="json"),
            files=files,
        )
        _write_synced(writing / MANIFEST, manifest.model_dump_json(indent=1))
        finish_folder(writing, final)  # the same step again, after a resume, replaces the older
        _prune(run_dir, run.train.keep_checkpoints)
    comm.barrier((axes.world,))
    return final


def load(folder: Path, model: nn.Module, optimizer: Optimizer | None, axes: Axes) -> Manifest:
    """Fill a model, and an optimizer if given, of any layout from a checkpoint of any layout."""
    from gridformer.checkpoint.blocks_io import read_blocks

    manifest = verify(folder, part=axes.world.index, n_parts=axes.world.size)
    shards: dict[str, tuple[Tensor, ParamShard]] = {
        f"model.{name}": (stored(parameter), shard_of(stored(parameter)))
        for name, parameter in model.named_parameters()
    }
    if optimizer is not None:
        optimizer.allocate(manifest.step - manifest.skipped)
        shards |= _moments(model, optimizer)
    with torch.no_grad():
        read_blocks(shards, folder)
    return manifest


def _shards(model: nn.Module, optimizer: Optimizer) -> dict[str, tuple[Tensor, ParamShard]]:
    parameters = {
        f"model.{name}": (parameter, shard_of(parameter)) for name, parameter in owned(model)
    }
    return parameters | _moments(model, optimizer)


def _moments(model: nn.Module, optimizer: Optimizer) -> dict[str, tuple[Tensor, ParamShard]]:
    state = optimizer.state
    return {
        f"{moment}.{name}": (state[parameter][moment], shard_of(parameter))
        for name, parameter in owned(model)
        for moment in _MOMENTS
    }


def _file_entries(folder: Path, axes: Axes) -> dict[str, FileEntry]:
    """Sizes and checksums of all files; each rank reads its share of them."""
    comm.barrier((axes.world,))
    paths = sorted(folder.glob("*.safetensors"))
    entries = torch.zeros(len(paths), 2, dtype=torch.int64)
    for number in range(axes.world.index, len(paths), axes.world.size):
        entries[number, 0] = paths[number].stat().st_size
        entries[number, 1] = _crc32(paths[number])
    if axes.world.size > 1 and torch.distributed.get_backend() == "nccl":
        entries = entries.cuda()
    entries = comm.all_reduce(entries, axes.world, label="checkpoint").cpu()
    return {
        path.name: FileEntry(bytes=size, crc32=crc)
        for path, (size, crc) in zip(paths, entries.tolist())
    }


def _complete(run_dir: Path) -> list[Path]:
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted(folder for folder in folders if folder.is_dir())


def _prune(run_dir: Path, keep: int) -> None:
    for folder in _complete(run_dir)[:-keep]:
        remove_folder(folder)
    remove_leftovers(run_dir / "checkpoints")


def _crc32(path: Path) -> int:
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
