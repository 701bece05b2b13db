"""Small runs whose samples share rows, and the loss of all samples of a split at once."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gridformer.data import TokenFolder
from gridformer.data.samples.batches import open_samples
from gridformer.launch.plan import plan_run
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.train.plan import Plan
from gridformer.train.step import Stepper
from gridformer.utils.batch import Batch
from tests.support.multirank.runs import MIDDLE, STEPS

SIZE = {"n_layers": 2, "hidden_size": 24, "n_heads": 4, "max_seq_len": 64, "dropout": 0.1}
TRAIN = {
    "steps": STEPS,
    "global_batch": 8,
    "lr": 3e-3,
    "eval_every": 0,
    "eval_batches": 1,
    "save_every": MIDDLE,
    "dtype": "float64",
    "sanity_checks": True,
}
PACKED = {"document_mask": True, "packing": "documents", "seq_len": 64}


def plan(out: Path, family: str, layout: dict[str, Any], **data: Any) -> Plan:
    """Plan a run of a small model that saves in its middle."""
    sections = {
        "model": {"family": family, **SIZE},
        "data": {key: str(value) if key == "path" else value for key, value in data.items()},
        "layout": layout,
        "train": TRAIN,
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
    return len(every), stepper.evaluate([partial(_given, batch)]).loss


def _given(batch: Batch, _: object) -> Batch:
    return batch
