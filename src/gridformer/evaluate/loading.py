"""Finds the checkpoint of a run from which a model is loaded."""

from __future__ import annotations

from pathlib import Path

from gridformer.checkpoint import checkpoint
from gridformer.config import RunConfig
from gridformer.utils.errors import CheckpointError


def load_for_inference(run_dir: Path) -> tuple[RunConfig, Path]:
    """Finds and verifies the newest checkpoint of a run directory.

    Args:
        run_dir: run directory, or one of its checkpoints.

    Returns:
        The resolved config of the run, and the folder of the checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    is_one = (run_dir / checkpoint.MANIFEST).is_file()
    folder = run_dir if is_one else checkpoint.latest(run_dir)
    if folder is None:
        raise CheckpointError(
            f"{run_dir} has no checkpoint: train first, for example with "
            f"`gridformer train configs/runs/demo.yaml --out {run_dir}`"
        )
    manifest = checkpoint.verify(folder)
    return RunConfig.model_validate(manifest.run), folder
