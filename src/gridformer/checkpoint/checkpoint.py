"""Checkpoints that do not depend on the layout, written atomically and verified before loading.

    RUNDIR/checkpoints/step-00000100/
        shard-*.safetensors     blocks of parameters and of the optimizer's two moments
        checkpoint.json         written last: step, model, training settings, files with checksums

A checkpoint is written into a hidden folder, which is renamed when complete. A folder with a plain
name is therefore complete, and a crash leaves the previous checkpoint intact. Besides tensors, the
only state of a run is its step and the loss scale of float16: data order, learning rate and dropout
masks are functions of (seed, step).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from gridformer import comm
from gridformer.checkpoint.index import Index, index_of_files
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
# The folder in a run directory for files of the imported model: its config, tokenizer, generation.
KEPT = "hugging_face"
# Keys of `model` that may differ between a checkpoint and the run that resumes from it.
_MAY_CHANGE = ("name", "dropout", "attention_dropout", "label_smoothing")
# Keys on which the order of samples depends.
_OF_DATA = (
    ("train", "global_batch"),
    ("data", "task"),
    ("data", "seq_len"),
    ("data", "source_len"),
)
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer(Protocol):
    """The part of an optimizer that checkpoints need."""

    @property
    def state(self) -> Mapping[nn.Parameter, Mapping[str, Tensor]]:
        """For each parameter that this rank updates, its moments by name."""

    def allocate(self, step: int) -> None:
        """Allocates the state of an optimizer that has made `step` updates, to be filled."""


class Scale(Protocol):
    """The part of a loss scale that checkpoints need; see `gridformer.train.loss_scale`."""

    scale: float
    good: int
    skipped: int


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


def latest(run_dir: Path) -> Path | None:
    """Returns the newest complete checkpoint of a run directory, or None."""
    found = _complete(run_dir)
    return found[-1] if found else None


def newest(run_dir: Path) -> Path:
    """Returns a checkpoint itself, or the newest complete one of a run directory.

    Args:
        run_dir: A run directory, or one of its checkpoints.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    if (run_dir / MANIFEST).is_file():
        return run_dir
    found = latest(run_dir)
    if found is None:
        remedy = (
            f"it is a folder of Hugging Face's, so first run `gridformer import {run_dir} --out "
            "RUNDIR`"
            if (run_dir / "config.json").is_file()
            else "train first, for example with `gridformer train configs/runs/demo.yaml --out "
            f"{run_dir}`"
        )
        raise CheckpointError(f"{run_dir} has no checkpoint: {remedy}")
    return found


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
        if contents and number % n_parts == part and _crc32(path) != entry.crc32:
            raise CheckpointError(f"{path} is damaged (its checksum is wrong): {remedy}")
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in manifest.files:
            raise CheckpointError(f"{path} does not belong to this checkpoint: remove that file")
    return manifest


def check_same_run(manifest: Manifest, run: RunConfig, folder: Path) -> None:
    """Checks that `run` continues the run that wrote a checkpoint.

    The layout, the schedule and what is reported may differ; settings on which the model depends
    may not, and those on which the order of its data depends may if `data.restart` says so.

    Raises:
        CheckpointError: Such settings differ, and the message lists all of them; or no run can
            resume from the checkpoint.
    """
    if manifest.weights_only:
        raise CheckpointError(
            f"{folder} holds imported weights without the state of an optimizer, so no run "
            f"resumes from it: use another --out, with train.init_from={folder.parents[1]} to "
            "begin with these weights"
        )
    there, here = manifest.run, run.model_dump(mode="json")
    keys = [("model", key) for key in here["model"] if key not in _MAY_CHANGE]
    differences = _differences(there, here, [*keys, ("train", "seed")])
    # Older checkpoints do not have the key, because their runs began with random weights.
    begun, wanted_from = there["train"].get("init_from"), here["train"]["init_from"]
    if begun != wanted_from:
        differences.append(f"train.init_from is {wanted_from}, there {begun}")
    of_data = [] if run.data.restart else _differences(there, here, _OF_DATA)
    if not differences and of_data:
        raise CheckpointError(
            f"{folder} belongs to a run with other data ({'; '.join(of_data)}): use another --out "
            f"for this run, or data.restart=true to begin the order of samples anew after step "
            f"{manifest.step}"
        )
    if differences:
        raise CheckpointError(
            f"{folder} belongs to another run ({'; '.join(differences + of_data)}): use another "
            "--out for this run"
        )


def data_start_of(manifest: Manifest, run: RunConfig) -> int:
    """Returns the step at which the order of samples began for a run that resumes.

    That is the step of the checkpoint if `data.restart` is set and settings of the data differ from
    those there. A run that resumes once more, with the same settings, goes on in the same order.
    """
    keys = [*_OF_DATA, ("data", "path")]
    if run.data.restart and _differences(manifest.run, run.model_dump(mode="json"), keys):
        return manifest.step
    return manifest.data_start


def _differences(
    there: Mapping[str, Any], here: Mapping[str, Any], keys: Sequence[tuple[str, str]]
) -> list[str]:
    """Returns the keys whose values differ, of those that the checkpoint has."""
    return [
        f"{section}.{key} is {here[section][key]}, there {there[section][key]}"
        for section, key in keys
        if key in there.get(section, {}) and there[section][key] != here[section][key]
    ]


def save(
    run_dir: Path,
    step: int,
    tokens: int,
    run: RunConfig,
    model: nn.Module,
    optimizer: Optimizer,
    axes: Axes,
    scale: Scale | None = None,
    data_start: int = 0,
) -> Path:
    """Writes a checkpoint. All ranks call it together.

    Args:
        run_dir: The run directory, on storage that all ranks share.
        step: How many optimizer steps are done.
        tokens: How many tokens the run has read.
        run: The run's config, which also says how many checkpoints to keep.
        model: This rank's model.
        optimizer: This rank's optimizer.
        axes: The axes of the mesh.
        scale: The loss scale; None means that there is none.
        data_start: The step at which the present order of samples began.

    Returns:
        The folder of the checkpoint.
    """
    # Imported here because it takes time, which commands that write no checkpoint save.
    from gridformer.checkpoint.blocks_io import write_blocks

    final = run_dir / "checkpoints" / f"step-{step:08d}"
    writing = hidden_folder(final)
    first = axes.world.index == 0
    if first:
        begin_folder(writing)
    comm.barrier((axes.world,))
    written = write_blocks(_shards(model, optimizer), writing, axes)
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
            files={
                name: FileEntry(bytes=n_bytes, crc32=crc)
                for name, (n_bytes, crc) in written.files.items()
            },
            index=written.index,
            data_start=data_start,
        )
        write_manifest(writing, manifest)
        finish_folder(writing, final)  # replaces a checkpoint of the same step
        _prune(run_dir, run.train.keep_checkpoints)
    comm.barrier((axes.world,))
    return final


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes checkpoint.json, which makes a folder a checkpoint."""
    _write_synced(folder / MANIFEST, manifest.model_dump_json())


def load(folder: Path, model: nn.Module, optimizer: Optimizer | None, axes: Axes) -> Manifest:
    """Loads a checkpoint, written under any layout, into a model and optimizer under any layout.

    All ranks call it together.

    Args:
        folder: The folder of the checkpoint.
        model: This rank's model, which is filled in place.
        optimizer: This rank's optimizer, whose state is allocated and filled; None loads only the
            model.
        axes: The axes of the mesh.

    Returns:
        The checkpoint's manifest.

    Raises:
        CheckpointError: A file is missing or damaged, or the checkpoint is of another model.
    """
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
        read_blocks(shards, folder, manifest.index or index_of_files(folder, manifest.files))
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
