"""What a run saves in a checkpoint, how it loads one, and from which ones it may resume.

Its folder has shards with blocks of parameters and of the optimizer's two moments, copies of small
files such as the tokenizer, and a manifest. The only other state of a run is its step and the loss
scale of float16: data order, learning rate and dropout masks are functions of (seed, step).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gridformer.checkpoint.blocks import PARAMETER, TensorBlock
from gridformer.checkpoint.manifest import Divergences, Manifest, verify_checkpoint
from gridformer.config import RunConfig
from gridformer.config.data import whole_weights
from gridformer.data.run_data import Fingerprint
from gridformer.data.tokenfolder import TOKENIZER
from gridformer.mesh import Axes
from gridformer.parallel.data.gradients import owned
from gridformer.parallel.data.zero import stored
from gridformer.parallel.sharding import ParamShard, shard_of
from gridformer.utils.errors import CheckpointError

# Keys of `model` that may differ between a checkpoint and the run that resumes from it.
_MAY_CHANGE = (
    *("name", "dropout", "attention_dropout", "label_smoothing"),
    *("balance_loss", "balance_rate", "z_loss"),
)
# Keys on which the order of samples depends.
_OF_DATA = (
    ("train", "global_batch"),
    ("data", "task"),
    ("data", "seq_len"),
    ("data", "source_len"),
    ("data", "document_mask"),
    ("data", "reset_positions"),
    ("data", "packing"),
    ("data", "n_choices"),
    ("data", "stride"),
)


class Optimizer(Protocol):
    """The part of an optimizer that checkpoints need."""

    @property
    def state(self) -> Mapping[nn.Parameter, Mapping[str, Tensor]]:
        """For each parameter that this rank updates, its moments by name, and perhaps `step`."""

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
    wanted = {f"{PARAMETER}{name}": block for name, block in stored_blocks(model).items()}
    if optimizer is not None:
        optimizer.allocate(manifest.step - manifest.skipped)
        moments = _moments(model, optimizer).items()
        wanted |= {name: TensorBlock.of(*shard) for name, shard in moments}
    with torch.no_grad():
        read_blocks(wanted, folder, manifest.index)
    return manifest


def stored_blocks(model: nn.Module) -> dict[str, TensorBlock]:
    """Returns the blocks of all parameters that this rank holds, by name."""
    held = {name: stored(parameter) for name, parameter in model.named_parameters()}
    return {name: TensorBlock.of(local, shard_of(local)) for name, local in held.items()}


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
        f"{moment}.{name}": (x, shard_of(parameter))
        for name, parameter in owned(model)
        for moment, x in sorted(state[parameter].items())
        if moment != "step"
    }


# ------------------------------------------------------------------ the same run


def check_same_run(
    manifest: Manifest,
    run: RunConfig,
    folder: Path | str,
    data: Fingerprint | None = None,
    instead: str = "another --out for this run",
) -> None:
    """Checks that `run` continues the run that wrote a checkpoint.

    The layout, the schedule and what is reported may differ; settings on which the model depends
    may not, nor may the tokenizer. The data and what its order depends on may if `data.restart`
    says so.

    Args:
        folder: The folder of the checkpoint, or its URL.
        data: The fingerprint of the run's data; None compares only settings.
        instead: What to use if the checkpoint is another run's.

    Raises:
        CheckpointError: Such settings differ, and it lists all; or no run can resume from it.
    """
    if manifest.weights_only:
        raise CheckpointError(
            f"{folder} holds weights without the state of an optimizer, so no run resumes from "
            f"it: use {instead}, with train.init_from={Path(folder).parents[1]} to begin with "
            "these weights"
        )
    there, here = manifest.run, run.model_dump(mode="json")
    differences = other_model(manifest, run)
    if (before := there["train"].get("optimizer", "adamw")) != run.train.optimizer:
        differences.append(f"train.optimizer is {run.train.optimizer}, there {before}")
    # Older checkpoints do not have the key, because their runs began with random weights.
    begun, begins = there["train"].get("init_from"), here["train"]["init_from"]
    if (begun and os.path.abspath(begun)) != (begins and os.path.abspath(begins)):
        differences.append(f"train.init_from is {begins}, there {begun}")
    if data is not None and manifest.data is not None:
        own, of_checkpoint = data.tokenizer, manifest.data.tokenizer
        if own and of_checkpoint and own != of_checkpoint:  # ids are other tokens
            differences.append(f"the contents of {TOKENIZER} changed")
    of_data = [] if run.data.restart else _of_data(manifest, run, data)
    if not differences and of_data:
        raise CheckpointError(
            f"{folder} belongs to a run with other data ({'; '.join(of_data)}): use {instead}, "
            f"or data.restart=true to begin the order of samples anew after step "
            f"{manifest.step}"
        )
    if differences:
        raise CheckpointError(
            f"{folder} belongs to another run ({'; '.join(differences + of_data)}): use {instead}"
        )


def check_copy(run: RunConfig, data: Fingerprint | None, manifest: Manifest) -> None:
    """Checks that a checkpoint at `train.checkpoint_to` is one of this run, as `check_same_run`."""
    url = f"{run.train.checkpoint_to.rstrip('/')}/step-{manifest.step:08d}"
    check_same_run(manifest, run, url, data, "another train.checkpoint_to for this run")


def other_model(manifest: Manifest, run: RunConfig) -> list[str]:
    """Returns the settings by which a run has another model than a checkpoint."""
    here = run.model_dump(mode="json")
    keys = [("model", key) for key in here["model"] if key not in _MAY_CHANGE]
    return _differences(manifest.run, here, [*keys, ("train", "seed")])


def data_start_of(manifest: Manifest, run: RunConfig, data: Fingerprint | None = None) -> int:
    """Returns the step at which the order of samples began for a run that resumes.

    That is the step of the checkpoint if `data.restart` is set and the data or settings of it
    differ from those there. A run that resumes once more, with the same data and settings, goes on
    in the same order. Without `data` only settings are compared.
    """
    if run.data.restart and _of_data(manifest, run, data):
        return manifest.step
    return manifest.data_start


def _of_data(manifest: Manifest, run: RunConfig, data: Fingerprint | None) -> list[str]:
    """Returns what differs in the data, which may have moved, and in settings of its order."""
    here = run.model_dump(mode="json")
    differences = _differences(manifest.run, here, _OF_DATA)
    if data is not None and manifest.data is not None:
        changed = data.differences(manifest.data)
        if changed:
            where = "data.sources" if run.data.sources else f"data.path={run.data.path}"
            differences.append(f"{where} has other data: {', '.join(changed)}")
    # The weights of later steps may change: what has been read stays the same.
    stages = [_weights(data, manifest.step) for data in (here["data"], manifest.run["data"])]
    ours, theirs = (
        [(first, dict(zip(weights, whole_weights([*weights.values()])))) for first, weights in one]
        for one in stages
    )
    if ours != theirs:
        words, other = (
            " and ".join(f"{weights} from step {first} on" for first, weights in one) or "none"
            for one in stages
        )
        differences.append(
            f"the weights of data.sources up to step {manifest.step} are {words}, there {other}"
        )
    return differences


def _weights(data: Mapping[str, Any], step: int) -> list[tuple[int, dict[str, float]]]:
    """Returns the weights that held in the first `step` steps, with the steps they began at."""
    own = {one["name"]: one["weight"] for one in data.get("sources") or ()}
    if not own:
        return []
    later = [
        (stage["from_step"], {name: stage["weights"].get(name, 0.0) for name in own})
        for stage in data.get("stages") or ()
    ]
    return [(1, own), *(stage for stage in later if stage[0] <= step)]


def _differences(
    there: Mapping[str, Any], here: Mapping[str, Any], keys: Sequence[tuple[str, str]]
) -> list[str]:
    """Returns the keys whose values differ, of those that the checkpoint has."""
    return [
        f"{section}.{key} is {here[section][key]}, there {there[section][key]}"
        for section, key in keys
        if key in there.get(section, {}) and there[section][key] != here[section][key]
    ]
