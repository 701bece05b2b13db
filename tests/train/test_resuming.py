"""If `train.fallback` goes back to an older checkpoint, what depends on it is that one's, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gridformer.checkpoint.checkpoint import data_start_of
from gridformer.checkpoint.copies import choose_checkpoint
from gridformer.config import LayoutConfig, RunConfig, parse_run
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.train.plan import Plan
from gridformer.train.saves import intact_checkpoint
from gridformer.train.step import Stepper
from gridformer.utils.errors import CheckpointError
from tests.support.checkpoints import save_checkpoint


def a_run(seq_len: int, restart: bool = False) -> RunConfig:
    model = {"n_layers": 1, "hidden_size": 8, "n_heads": 2, "vocab_size": 11, "max_seq_len": 4}
    data = {"path": "unused", "seq_len": seq_len, "restart": restart}
    return parse_run({"model": model, "data": data, "train": {"global_batch": 2, "fallback": True}})


def saved(out: Path, run: RunConfig, step: int, data_start: int) -> Path:
    """Save random weights as a run would that has done so many steps."""
    model = build_parallel(run.model, LayoutConfig(), Axes(), step, torch.device("cpu"))
    updates = Stepper(model, run.train, Axes()).updates
    updates.allocate(step)
    return save_checkpoint(out, step, 0, run, model, updates, Axes(), data_start=data_start)


def planned(out: Path, run: RunConfig) -> Plan:
    """Plan to resume, as long as only manifests and sizes have been looked at."""
    found = choose_checkpoint(run.train, out)
    assert found is not None
    step, start = found.manifest.step, data_start_of(found.manifest, run)
    return Plan(run, out, found.folder, step, decide_run(run), data_start=start, older=found.older)


def flip(folder: Path) -> None:
    """Flip a bit of the weights."""
    (path,) = folder.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def test_a_new_order_of_samples_begins_where_the_run_goes_on(tmp_path: Path) -> None:
    """The data change with `data.restart` after step 5, which is found damaged."""
    saved(tmp_path, a_run(4), 3, data_start=0)
    newest = saved(tmp_path, a_run(4), 5, data_start=0)
    run = a_run(2, restart=True)
    plan, verified = intact_checkpoint(planned(tmp_path, run), Axes())
    assert (plan.resume_step, plan.data_start) == (5, 5)
    assert verified is not None
    flip(newest)
    plan, verified = intact_checkpoint(planned(tmp_path, run), Axes())
    assert (plan.resume_step, plan.data_start) == (3, 3)
    assert verified is not None
    assert verified.step == 3


def test_an_older_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    """The data have changed after step 3, and nothing says that they may do so once more."""
    saved(tmp_path, a_run(4), 3, data_start=0)
    newest = saved(tmp_path, a_run(2), 5, data_start=3)
    plan, _ = intact_checkpoint(planned(tmp_path, a_run(2)), Axes())
    assert (plan.resume_step, plan.data_start) == (5, 3)
    flip(newest)
    with pytest.raises(CheckpointError, match=r"step-00000003 belongs to a run with other data"):
        intact_checkpoint(planned(tmp_path, a_run(2)), Axes())
