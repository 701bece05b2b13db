"""Checkpoints of small models that were not trained."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gridformer.checkpoint.blocks import Shards
from gridformer.checkpoint.checkpoint import Optimizer, manifest_of, shards_of
from gridformer.checkpoint.save import SaveOutcome
from gridformer.checkpoint.saver import Saver
from gridformer.checkpoint.store import name_of
from gridformer.config import LayoutConfig, RunConfig, parse_run
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.parallel.sharding import ParamShard
from gridformer.train.step import Stepper

MODEL = {"n_layers": 1, "hidden_size": 8, "n_heads": 2, "vocab_size": 11, "max_seq_len": 4}


def flip_a_bit(path: Path) -> None:
    """Flip a bit near the end of a file; called once more, it restores the file."""
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def small_run(data: Path | str = "unused", model: Any = None, **train: Any) -> RunConfig:
    """Return the config of a small run; `model` changes keys of MODEL."""
    return parse_run({"model": {**MODEL, **(model or {})}, "data": {"path": str(data)},
                      "train": train})  # fmt: skip


def built(run: RunConfig, seed: int) -> Model:
    """Return the model of a run with the initial weights of a seed."""
    cpu = torch.device("cpu")
    return build_parallel(run.model, LayoutConfig(), Axes(), seed, cpu, run.train.dtype)


def save_checkpoint(
    out: Path,
    step: int,
    tokens: int,
    run: RunConfig,
    model: nn.Module,
    updates: Optimizer,
    axes: Axes,
    **more: Any,
) -> Path:
    """Write a checkpoint and return its folder; all ranks call it together."""
    manifest = manifest_of(step, tokens, run, **more)
    Saver(out, run, axes).save(manifest, shards_of(model, updates))
    return out / "checkpoints" / name_of(step)


def save_model(out: Path, run: RunConfig, step: int = 1, seed: int = 1, **more: Any) -> Path:
    """Save a checkpoint of a model with initial weights, and return its folder."""
    model = built(run, seed)
    updates = Stepper(model, run.train, Axes()).updates
    updates.allocate(step)
    return save_checkpoint(out, step, 8 * step, run, model, updates, Axes(), **more)


def filled(value: float) -> Shards:
    """Return what a run of one process saves, if it has one tensor that is full of a value."""
    return {"a": (torch.full((6, 3), value), ParamShard((6, 3), (0, 0)))}


def save_filled(saver: Saver, step: int, run: RunConfig, value: float, wait: bool) -> SaveOutcome:
    """Save what `filled` returns, and return what became of it."""
    saver.save(manifest_of(step, 0, run), filled(value), wait=wait, last=False)
    saver.finish()
    (outcome,) = saver.news()
    return outcome
