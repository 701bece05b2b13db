"""Which checkpoint of a run a model is taken from."""

from __future__ import annotations

from pathlib import Path

from gridformer.checkpoint import checkpoint
from gridformer.config import RunConfig
from gridformer.utils.errors import CheckpointError


def load_for_inference(run_dir: Path) -> tuple[RunConfig, Path]:
    """The resolved config and newest checkpoint of a run directory, verified.

    `run_dir` may also be one of its checkpoints. Raises CheckpointError.
    """
    is_one = (run_dir / checkpoint.MANIFEST).is_file()
    folder = run_dir if is_one else checkpoint.latest(run_dir)
    if folder is None:
        raise CheckpointError(
            f"{run_dir} holds no checkpoint: train first, for instance "
            f"`gridformer train configs/runs/demo.yaml --out {run_dir}`"
        )
    manifest = checkpoint.verify(folder)
    return RunConfig.model_validate(manifest.run), folder
