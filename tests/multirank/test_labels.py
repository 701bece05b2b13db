"""The classification branch, from a chosen token's hidden vector to a label, on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer import comm
from gridformer.config import LayoutConfig
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data.copies import assert_copies_equal, share_copies
from gridformer.parallel.data.gradients import owned, reduce_gradients
from tests.support.marks import full_unless
from tests.support.multirank.exactness import CPU, batch_of, distance, gradients, tiny, values
from tests.support.multirank.pool import WorkerPool

B, N_LABELS = 12, 3
CONFIG = tiny(n_labels=N_LABELS, dropout=0.1)

LAYOUTS: list[dict[str, Any]] = [
    {"scheme": "megatron", "cols": 4},
    {"scheme": "megatron", "cols": 3, "sequence_parallel": True},
    {"scheme": "megatron", "cols": 2, "dp": 2},
    {"scheme": "optimus", "rows": 2, "cols": 2},
    {"scheme": "optimus", "rows": 2, "cols": 2, "schedule": "broadcast", "stationary": "input"},
    {"scheme": "optimus", "rows": 1, "cols": 4},
    {"scheme": "optimus", "rows": 4, "cols": 1},
    {"scheme": "optimus", "rows": 2, "cols": 3, "schedule": "pipelined"},
    {"scheme": "optimus", "rows": 3, "cols": 3},
]


def both_losses(model: Model, batch: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Return the sums of language model and label losses of some sequences; tokens are random."""
    generator = torch.Generator().manual_seed(5)
    at = torch.randint(0, CONFIG.max_seq_len, (B,), generator=generator)
    at[0], at[-1] = 0, CONFIG.max_seq_len - 1
    labels = torch.randint(0, N_LABELS, (B,), generator=generator)
    model.dropout_rng.first_sample = rows.start
    part = batch[rows]
    logits = model.logits({"tokens": part[:, :-1], "at": at[rows]})["labels"]
    assert logits.shape == (len(part), N_LABELS)
    return (
        model.loss_sum(part[:, :-1], part[:, 1:]),
        F.cross_entropy(logits, labels[rows], reduction="sum"),
    )


def compare_labels(layout: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(1)
    plan = LayoutConfig(**layout)
    axes = build_axes(plan, "cpu")
    whole = build_parallel(CONFIG, LayoutConfig(), Axes(), 1, CPU, "float64")
    cut = build_parallel(CONFIG, plan, axes, 1, CPU, "float64")
    worst = {"init": distance(cut, values(cut), values(whole))}
    part = axes.dp.index * axes.row.size + axes.row.index
    size = B // (axes.dp.size * axes.row.size)
    mine = slice(part * size, (part + 1) * size)
    steps = [
        (model, torch.optim.AdamW([p for _, p in owned(model)], lr=1e-3, eps=1e-4, fused=True))
        for model in (whole, cut)
    ]
    for step in range(2):
        batch = batch_of(step, CONFIG, B)
        losses = []
        for (model, _), rows, the_axes in zip(steps, (slice(0, B), mine), (Axes(), axes)):
            model.train()
            model.zero_grad()
            lm, label = both_losses(model, batch, rows)
            (lm / (B * CONFIG.max_seq_len) + label / B).backward()
            reduce_gradients(model.parameters(), the_axes)
            first = float(the_axes.col.index == 0)
            sums = torch.stack((lm, label)).detach() * first
            losses.append(comm.all_reduce(sums, the_axes.world))
            if model is cut:
                worst[f"grad {step}"] = distance(cut, gradients(cut), gradients(whole))
                for stepped, other in steps:
                    other.step()
                    share_copies(stepped.parameters(), axes if stepped is cut else Axes())
        worst[f"loss {step}"] = float((losses[1] / losses[0] - 1).abs().max())
    worst["parameter"] = distance(cut, values(cut), values(whole))
    assert_copies_equal(cut, axes)
    return worst


QUICK = [LAYOUTS[i] for i in (2, 5, 7)]


@pytest.mark.parametrize(
    "layout", full_unless(QUICK.__contains__, LAYOUTS), ids=lambda g: "-".join(map(str, g.values()))
)
def test_labels_equal_one_device(pool: WorkerPool, layout: dict[str, Any]) -> None:
    for worst in pool.run(LayoutConfig(**layout).n_processes, compare_labels, layout):
        assert all(value < 1e-9 for value in worst.values()), worst
