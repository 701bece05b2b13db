"""Small runs on layouts, also of samples that share rows; their losses and stored blocks."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import read_manifest
from gridformer.config import RunConfig, parse_run
from gridformer.data import TokenFolder
from gridformer.data.samples.batches import open_samples
from gridformer.launch.plan import plan_run
from gridformer.mesh import Axes
from gridformer.mesh.process_group import World
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.validation import check_layout
from gridformer.train import journal, trainer
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from gridformer.train.step import Stepper
from gridformer.train.trainer import Trainer

Result = TypeVar("Result")

STEPS, MIDDLE = 5, 3
TRAIN = {
    **{"steps": STEPS, "lr": 3e-3, "eval_every": 99, "save_every": MIDDLE},
    **{"dtype": "float64", "sanity_checks": True},
}


def plan_of(data: Path, out: Path, layout: dict[str, Any], **train: Any) -> Plan:
    model = {**SIZE, "n_heads": 12, "vocab_size": 301, "max_seq_len": 12, "attention_dropout": 0.1}
    settings = {**TRAIN, "global_batch": 24, "warmup_steps": 2, "eval_batches": 2, **train}
    sections = {"model": model, "layout": layout, "data": {"path": str(data), "seq_len": 12}}
    return plan_for(parse_run({"name": "test", "train": settings, **sections}), out)


def plan_for(run: RunConfig, out: Path) -> Plan:
    """Plan a run, which goes on from its last checkpoint."""
    check_layout(run)
    resume = find.latest(out)
    step = read_manifest(resume).step if resume else 0
    return Plan(run, out, resume, step, decide_run(run))


def train(plan: Plan) -> None:
    """Run the production trainer on the pool's process group; the work of one rank.

    It draws no picture of the losses, which would take longer than the steps.
    """
    world = World(dist.get_rank(), 0, dist.get_world_size(), torch.device("cpu"), "gloo", "test")
    with patch.object(journal, "plot_loss"):
        Trainer(plan, world).fit()


def train_a_step_ahead(how: Callable[..., Result], *args: Any) -> Result:
    """Call a function that trains; as on a GPU, a step starts before the last one's result is read.

    Example: `pool.run(2, train_a_step_ahead, train, plan)`.
    """
    with patch.object(trainer, "max_in_flight", lambda *_: 1):
        return how(*args)


def losses(out: Path) -> dict[int, tuple[float, float]]:
    return {m["step"]: (m["loss"], m["grad_norm"]) for m in read_metrics(out) if "loss" in m}


def tokens(out: Path) -> list[int]:
    """Return the tokens read since the run began, at each step and in the last checkpoint."""
    last = find.latest(out)
    assert last is not None
    return [*(m["tokens"] for m in read_metrics(out)), read_manifest(last).tokens]


def assert_same_run(whole: Path, moved: Path) -> None:
    """Check that a run which moved between layouts has the same losses as one which did not."""
    want, got = losses(whole), losses(moved)
    assert list(got) == list(range(1, STEPS + 1))
    for step in want:
        assert got[step] == pytest.approx(want[step], rel=1e-9), step
    assert tokens(moved) == tokens(whole), "tokens are counted on"
    evals = [read_metrics(out)[-1]["val_loss"] for out in (whole, moved)]
    assert evals[1] == pytest.approx(evals[0], rel=1e-9)


def start_from(finished: Path, out: Path, step: int = MIDDLE) -> None:
    """Create a run directory as it was after some steps."""
    name = f"step-{step:08d}"
    shutil.copytree(finished / "checkpoints" / name, out / "checkpoints" / name)
    shutil.copy(finished / "metrics.jsonl", out)


def stored(out: Path, step: int = STEPS) -> dict[tuple[str, str], torch.Tensor]:
    """Return every block of a checkpoint, parameters and moments, by name and offset."""
    blocks = {}
    for path in (out / f"checkpoints/step-{step:08d}").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                blocks[name, str(offsets[name])] = file.get_tensor(name)
    return blocks


def assert_same_bits(one: Path, other: Path, step: int = STEPS) -> None:
    """Check that two runs have stored the same blocks at a step, bit by bit."""
    want, got = stored(one, step), stored(other, step)
    assert want.keys() == got.keys()
    for key in want:
        assert torch.equal(want[key], got[key]), (step, key)


SIZE = {"n_layers": 2, "hidden_size": 24, "n_heads": 4, "max_seq_len": 64, "dropout": 0.1}
PACKED = {"document_mask": True, "packing": "documents", "seq_len": 64}


def plan(out: Path, family: str, layout: dict[str, Any], **data: Any) -> Plan:
    """Plan a run of a small model that saves in its middle."""
    sections = {
        "model": {"family": family, **SIZE},
        "data": {key: str(value) if key == "path" else value for key, value in data.items()},
        "layout": layout,
        "train": {**TRAIN, "global_batch": 8, "eval_batches": 1},
    }
    file = out.with_suffix(".yaml")
    file.write_text(json.dumps(sections))  # JSON is also YAML
    return plan_run(file, out=out)


def loss_of_all(plan: Plan, folder: TokenFolder) -> tuple[int, float]:
    """Return the number of samples for validation, and an untrained model's loss of all of them."""
    run = plan.run
    samples = open_samples(run, folder.val, folder.tokenizer)
    draw = np.random.default_rng(0)
    every = [samples.sample(number, draw) for number in range(samples.n_samples)]
    batch = {key: torch.tensor(np.stack([one[key] for one in every])) for key in every[0]}
    train = run.train.model_copy(update={"global_batch": len(every)})
    model = build_parallel(run.model, run.layout, Axes(), 1, torch.device("cpu"), "float64")
    stepper = Stepper(model, train, Axes(), run.layout)
    return len(every), stepper.evaluate([lambda _: batch]).loss
