"""`gridformer average`: the mean of a run's last checkpoints, as a run directory of its own.

Vaswani et al. (2017, section 6.1) translate with the mean of the last 5 checkpoints of a base
model and of the last 20 of a big one. Parameters are read as whole tensors, one at a time, so the
layouts that wrote the checkpoints do not matter and need not be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import advice_for_readers, verify_checkpoint
from gridformer.checkpoint.safetensors_file import Streamed
from gridformer.checkpoint.side_files import copy_side_files, root_of
from gridformer.checkpoint.whole import StoredParameters, shapes_of, write_weights
from gridformer.config import RunConfig
from gridformer.utils.errors import CheckpointError, ConfigError
from gridformer.utils.folders import new_folder, refuse_existing


def average_run(
    run_dir: Path,
    out: Path,
    last: int,
    tell: Callable[[str], None] = lambda doing: None,
    name: str = "",
) -> tuple[int, ...]:
    """Writes the mean of the last checkpoints of a run to a new run directory.

    The mean is computed in float64 and stored in the type of the newest checkpoint.

    Args:
        run_dir: The run directory.
        out: The run directory to write, which must not exist.
        last: How many checkpoints are averaged, at least 2.
        tell: Receives progress messages.
        name: What errors call the run; empty means the run directory.

    Returns:
        The steps whose checkpoints were averaged, in their order.

    Raises:
        ConfigError: The run has fewer checkpoints.
        CheckpointError: A checkpoint is damaged or of another model.
        UserError: There already is something at `out`.
    """
    refuse_existing(out)
    folders = find.complete(run_dir)
    if problem := _too_few(name or str(run_dir), last, len(folders)):
        raise ConfigError(problem)
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
    streamed = {
        name: Streamed(shape, stored[-1].dtype(name), partial(_mean, stored, name))
        for name, shape in shapes.items()
    }
    run = RunConfig.model_validate(newest.run)
    with new_folder(out) as writing:
        step = writing / "checkpoints" / folders[-1].name
        step.mkdir(parents=True)
        (writing / "config.yaml").write_text(run.to_yaml(), encoding="utf-8")
        copy_side_files(root_of(folders[-1]), writing)
        write_weights(step, streamed, run, newest.step, newest.tokens, tell)
    return tuple(manifest.step for manifest in manifests)


def _too_few(run_dir: str, last: int, n: int) -> str:
    """Returns why that number of the last checkpoints cannot be averaged, or an empty text."""
    if last < 2:
        return f"--last {last} leaves nothing to average: use --last 2 or more"
    if n < 2:
        return (
            f"{run_dir} has {n or 'no'} checkpoint{'s' * (n != 1)}, and an average needs at least "
            "2: train with a smaller train.save_every"
        )
    if n < last:
        return (
            f"--last {last}: {run_dir} has {n} checkpoints: use --last {n}, or train with "
            f"train.keep_checkpoints={last}"
        )
    return ""


def _mean(stored: Sequence[StoredParameters], name: str) -> Tensor:
    total = stored[0].whole(name).to(torch.float64, copy=True)
    for one in stored[1:]:
        total += one.whole(name)
    return total.div_(len(stored))
