"""Checkpoints that do not depend on the layout, written atomically and verified before loading.

    RUNDIR/checkpoints/step-00000100/
        shard-*.safetensors     blocks of parameters and of the optimizer's two moments
        tokenizer.json, ...     copies of the small files that a model needs besides its weights
        checkpoint.json         written last: step, model, training settings, files with checksums

A checkpoint is written into a hidden folder, which is renamed when complete. A folder with a plain
name is therefore complete, and a crash leaves the previous checkpoint intact. Besides tensors, the
only state of a run is its step and the loss scale of float16: data order, learning rate and dropout
masks are functions of (seed, step).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from gridformer.checkpoint.blocks import MOMENTS, PARAMETER, TensorBlock
from gridformer.checkpoint.manifest import Divergences, Manifest, verify_checkpoint
from gridformer.config import RunConfig
from gridformer.data.run_data import Fingerprint
from gridformer.mesh import Axes
from gridformer.parallel.data.gradients import owned
from gridformer.parallel.data.zero import stored
from gridformer.parallel.sharding import ParamShard, shard_of


class Optimizer(Protocol):
    """The part of an optimizer that checkpoints need."""

    @property
    def state(self) -> Mapping[nn.Parameter, Mapping[str, Tensor]]:
        """For each parameter that this rank updates, its moments by name."""

    def allocate(self, step: int) -> None:
        """Allocates the state of an optimizer that has made `step` updates, to be filled."""


class Scale(Protocol):
    """The part of a loss scale that checkpoints need."""

    scale: float
    good: int
    skipped: int


def manifest_of(
    step: int,
    tokens: int,
    run: RunConfig,
    scale: Scale | None = None,
    data_start: int = 0,
    data: Fingerprint | None = None,
    divergences: Divergences | None = None,
) -> Manifest:
    """Returns the manifest of a checkpoint whose files are not written yet.

    `scale` is the loss scale of float16, and None with other types.
    """
    return Manifest(
        format="gridformer-checkpoint",
        version=1,
        step=step,
        tokens=tokens,
        skipped=scale.skipped if scale else 0,
        loss_scale=scale.scale if scale else 1.0,
        good_steps=scale.good if scale else 0,
        model=run.model,
        run=run.model_dump(mode="json"),
        files={},
        data_start=data_start,
        data=data,
        divergences=divergences or Divergences(),
    )


def load(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    axes: Axes,
    verified: Manifest | None = None,
) -> Manifest:
    """Loads a checkpoint, written under any layout, into a model and optimizer under any layout.

    All ranks call it together. The model is filled in place, and so is the state of the optimizer,
    which is allocated; None loads only the model.

    Args:
        verified: The checkpoint's manifest if all ranks have verified it already.

    Raises:
        CheckpointError: A file is missing or damaged, or the checkpoint is of another model.
    """
    from gridformer.checkpoint.safetensors_file import read_blocks

    manifest = verified or verify_checkpoint(folder, part=axes.world.index, n_parts=axes.world.size)
    shards: dict[str, tuple[Tensor, ParamShard]] = {
        f"{PARAMETER}{name}": (stored(parameter), shard_of(stored(parameter)))
        for name, parameter in model.named_parameters()
    }
    if optimizer is not None:
        optimizer.allocate(manifest.step - manifest.skipped)
        shards |= _moments(model, optimizer)
    with torch.no_grad():
        wanted = {name: TensorBlock.of(*shard) for name, shard in shards.items()}
        read_blocks(wanted, folder, manifest.index)
    return manifest


def shards_of(model: nn.Module, optimizer: Optimizer) -> dict[str, tuple[Tensor, ParamShard]]:
    """Returns what this rank updates and therefore saves: parameters and moments."""
    return updated_parameters(model) | _moments(model, optimizer)


def updated_parameters(model: nn.Module) -> dict[str, tuple[Tensor, ParamShard]]:
    """Returns the parameters that this rank updates."""
    return {
        f"{PARAMETER}{name}": (parameter, shard_of(parameter)) for name, parameter in owned(model)
    }


def _moments(model: nn.Module, optimizer: Optimizer) -> dict[str, tuple[Tensor, ParamShard]]:
    state = optimizer.state
    return {
        f"{moment}.{name}": (state[parameter][moment], shard_of(parameter))
        for name, parameter in owned(model)
        for moment in MOMENTS
    }
