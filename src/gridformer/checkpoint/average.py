"""`gridformer average`: the mean of a run's last checkpoints, as a run directory of its own.

Vaswani et al. (2017, section 6.1) translate with the mean of the last 5 checkpoints of a base
model and of the last 20 of a big one. Parameters are read as whole tensors, one at a time, so the
layouts that wrote the checkpoints do not matter and need not be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gridformer.checkpoint import find
from gridformer.checkpoint.convert.files import row_slices
from gridformer.checkpoint.convert.stored import StoredParameters
from gridformer.checkpoint.convert.weights_only import write_weights
from gridformer.checkpoint.manifest import Manifest, advice_for_readers, verify_checkpoint
from gridformer.checkpoint.safetensors_file import Streamed
from gridformer.checkpoint.shapes import shapes_of
from gridformer.checkpoint.side_files import copy_side_files, root_of
from gridformer.config import RunConfig
from gridformer.utils.errors import CheckpointError, ConfigError
from gridformer.utils.folders import new_folder, refuse_existing


@dataclass(frozen=True)
class Averaged:
    """The steps whose checkpoints were averaged, in their order."""

    steps: tuple[int, ...]


def average_run(
    run_dir: Path,
    out: Path,
    last: int,
    tell: Callable[[str], None] = lambda doing: None,
    name: str = "",
) -> Averaged:
    """Writes the mean of the last checkpoints of a run to a new run directory.

    The mean is computed in float64 and stored in the type of the newest checkpoint.

    Args:
        run_dir: The run directory.
        out: The run directory to write, which must not exist.
        last: How many checkpoints are averaged, at least 2.
        tell: Receives progress messages.
        name: What errors call the run; empty means the run directory.

    Raises:
        ConfigError: The run has fewer checkpoints.
        CheckpointError: A checkpoint is damaged or of another model.
        UserError: There already is something at `out`.
    """
    refuse_existing(out)
    folders = find.complete(run_dir)
    _check_number(name or str(run_dir), last, len(folders))
    folders = folders[-last:]
    manifests = []
    for folder in folders:
        tell(f"verifying {folder.name}")
        with advice_for_readers(folder, any_will_do=False):
            manifests.append(verify_checkpoint(folder))
    newest = manifests[-1]
    for folder, manifest in zip(folders, manifests):
        if manifest.model != newest.model:
            raise CheckpointError(f"{folder} is of another model than {folders[-1]}: move it away")
    shapes = shapes_of(newest.model)
    stored = [StoredParameters(*one, shapes) for one in zip(folders, manifests)]
    streamed = {}
    for name, shape in shapes.items():
        dtype = stored[-1].dtype(name)
        streamed[f"model.{name}"] = Streamed(shape, dtype, partial(_means, stored, name, dtype))
    with new_folder(out) as writing:
        _write(writing, folders[-1], newest, streamed, tell)
    return Averaged(tuple(manifest.step for manifest in manifests))


def _check_number(run_dir: str, last: int, found: int) -> None:
    if last < 2:
        raise ConfigError([f"--last {last} leaves nothing to average: use --last 2 or more"])
    if found < 2:
        raise ConfigError(
            [
                f"{run_dir} has {found or 'no'} checkpoint{'s' * (found != 1)}, and an average "
                f"needs at least 2: train with a smaller train.save_every"
            ]
        )
    if found < last:
        raise ConfigError(
            [
                f"--last {last}: {run_dir} has {found} checkpoints: use --last {found}, or train "
                f"with train.keep_checkpoints={last}"
            ]
        )


def _means(stored: Sequence[StoredParameters], name: str, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yields the rows of a parameter's mean, some at a time."""
    wholes = [one.whole(name) for one in stored]
    for rows in row_slices(wholes[0].shape, torch.float64):
        total = wholes[0][rows].double()
        for whole in wholes[1:]:
            total = total + whole[rows].double()
        yield (total / len(wholes)).to(dtype)


def _write(
    writing: Path,
    folder: Path,
    newest: Manifest,
    streamed: dict[str, Streamed],
    tell: Callable[[str], None],
) -> None:
    run = RunConfig.model_validate(newest.run)
    step = writing / "checkpoints" / folder.name
    step.mkdir(parents=True)
    (writing / "config.yaml").write_text(run.to_yaml(), encoding="utf-8")
    copy_side_files(root_of(folder), writing)
    write_weights(step, streamed, run, newest.step, newest.tokens, tell)
