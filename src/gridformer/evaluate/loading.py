"""Finds the checkpoint of a run from which a model is loaded."""

from __future__ import annotations

from pathlib import Path

from gridformer.checkpoint import checkpoint
from gridformer.config import RunConfig


def load_for_inference(run_dir: Path) -> tuple[RunConfig, Path]:
    """Finds and verifies the newest checkpoint of a run directory.

    Args:
        run_dir: run directory, or one of its checkpoints.

    Returns:
        The resolved config of the run, and the folder of the checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    folder = checkpoint.newest(run_dir)
    manifest = checkpoint.verify(folder)
    return RunConfig.model_validate(manifest.run), folder
