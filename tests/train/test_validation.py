"""What a run reports, computed again from its files: the validation text, and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gridformer.config import LayoutConfig, RunConfig, parse_run
from gridformer.data import TokenFolder
from gridformer.mesh import Axes
from gridformer.mesh.process_group import World
from gridformer.models import GPT2
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.train.flops import StepFlops
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from gridformer.train.trainer import Trainer
from tests.support.multirank.pool import WorkerPool

SEQ, STEPS = 16, 4


def run_of(data: Path, **train: Any) -> RunConfig:
    sections = {
        "model": {
            "n_layers": 1,
            "hidden_size": 16,
            "n_heads": 2,
            "max_seq_len": SEQ,
            "vocab_size": 301,
            "dropout": 0.3,
            "init_std": 0.5,  # different texts have different losses from the first step
        },
        "data": {"path": str(data), "seq_len": SEQ},
        "train": {"steps": STEPS, "eval_every": 0, "dtype": "float64", "seed": 3, **train},
    }
    return parse_run(sections)


def fit(plan: Plan) -> None:
    world = World(0, 0, 1, torch.device("cpu"), "gloo", "test")
    Trainer(plan, world).fit()


def windows_of(file: Path) -> torch.Tensor:
    """Return all samples of a token file, [n, SEQ + 1], in file order."""
    ids = np.fromfile(file, dtype=np.uint16).astype(np.int64)
    n = (len(ids) - 1) // SEQ
    return torch.from_numpy(np.stack([ids[i * SEQ : (i + 1) * SEQ + 1] for i in range(n)]))


def test_validation_reads_all_held_out_text(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """val_loss is the mean over val.bin, which is read here with numpy.

    An evaluation of as many rows as val.bin has windows reads each window once, in any order.
    Batches have few rows, so that there are several.
    """
    windows = windows_of(token_folder / "val.bin")
    rows = next(rows for rows in (7, 5, 3, 2, 1) if len(windows) % rows == 0)
    n_batches = len(windows) // rows
    assert n_batches > 3
    run = run_of(token_folder, global_batch=rows, eval_batches=n_batches, steps=1)
    pool.run(1, fit, Plan(run, tmp_path, None, 0, decide_run(run)))
    plain = run.model.model_copy(update={"dropout": 0.0})
    model = build_parallel(plain, LayoutConfig(), Axes(), 3, torch.device("cpu"), "float64").eval()
    assert isinstance(model, GPT2)

    def loss_of(windows: torch.Tensor) -> float:
        with torch.no_grad():
            logits = model(windows[:, :-1])
            return float(F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))

    want = loss_of(windows)
    assert read_metrics(tmp_path)[0]["val_loss"] == pytest.approx(want, rel=1e-9)
    train = windows_of(token_folder / "train.bin")[: len(windows)]
    assert loss_of(train) != pytest.approx(want, rel=1e-4), "the test must tell them apart"


def test_training_and_validation_texts_share_no_document(
    token_folder: Path,
) -> None:
    folder = TokenFolder.open(token_folder)
    documents = {
        name: [split.document(i).tobytes() for i in range(split.n_documents)]
        for name, split in (("train", folder.train), ("val", folder.val))
    }
    assert documents["train"]
    assert documents["val"]
    assert not set(documents["train"]) & set(documents["val"])
    assert len(documents["train"]) + len(documents["val"]) == 12


def test_metrics_are_of_their_own_step(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """The learning rate follows its formula; tokens add up, and tokens/s are those of one step."""
    run = run_of(
        token_folder, global_batch=2, eval_batches=1, lr=0.01, warmup_steps=2, peak_tflops=0.5
    )
    pool.run(1, fit, Plan(run, tmp_path, None, 0, decide_run(run)))
    first, *lines = read_metrics(tmp_path)
    assert (first["step"], first["tokens"]) == (0, 0)
    # Warm-up: half, then the full rate. Then a cosine's start and its end, a tenth.
    assert [line["lr"] for line in lines] == pytest.approx([0.005, 0.01, 0.01, 0.001])
    for number, line in enumerate(lines, start=1):
        assert line["step"] == number
        assert line["tokens"] == 2 * SEQ * number
        assert line["tokens_per_s"] * line["step_time_s"] == pytest.approx(2 * SEQ)
        flops = line["model_tflops"] * line["step_time_s"] * 1e12
        assert flops == pytest.approx(StepFlops.of(run).model)
        assert line["mfu"] == line["hfu"] == pytest.approx(line["model_tflops"] / 0.5)
