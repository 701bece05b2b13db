"""`train.checkpoint_to`: what a run does about it before its processes start and after they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gridformer.launch.plan import plan_run
from gridformer.utils.errors import ConfigError


@pytest.fixture
def run_file(token_folder: Path, tmp_path: Path) -> Path:
    sections: dict[str, Any] = {
        "model": {"family": "gpt2", "n_layers": 1, "hidden_size": 8, "n_heads": 2},
        "data": {"path": str(token_folder), "seq_len": 8},
        "layout": {"scheme": "single"},
        "train": {
            "steps": 4,
            "global_batch": 2,
            "save_every": 2,
            "eval_every": 0,
            "eval_batches": 1,
            "loggers": [],
            "device": "cpu",
            "checkpoint_to": f"file://{tmp_path}/far",
            "full_disk_wait_s": 0,
        },
    }
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(sections))
    return file


def test_a_place_inside_the_run_directory_is_refused(run_file: Path, tmp_path: Path) -> None:
    """Each copy would remove the checkpoint itself."""
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="is where the run itself writes"):
        plan_run(run_file, [f"train.checkpoint_to={out}/checkpoints"], out=out)
    assert plan_run(run_file, out=out).resume is None
