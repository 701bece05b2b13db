"""What a layer keeps for its backward pass, counted: the table in docs/concepts.md."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from gridformer.config import LayoutConfig
from gridformer.layout import build_axes
from gridformer.parallel import build_parallel
from tests.multirank.exactness import CPU, batch_of, tiny
from tests.multirank.pool import WorkerPool

B = 12
CONFIG = tiny()
BSH = B * CONFIG.max_seq_len * CONFIG.hidden_size


def kept(layout: dict[str, Any], n_layers: int) -> int:
    """Elements of all distinct tensors of the size of activations that autograd holds on to."""
    plan = LayoutConfig(**layout)
    axes = build_axes(plan, "cpu")
    model = build_parallel(tiny(n_layers=n_layers), plan, axes, 1, CPU)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    rows = B // axes.row.size
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in parameters and tensor.dim() >= 2 and tensor.shape[-1] > 1:
            held[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        part = batch_of(0, CONFIG, B)[:rows]
        model.loss_sum(part[:, :-1], part[:, 1:])
    return sum(t.untyped_storage().nbytes() // t.element_size() for t in held.values())


def one_layer(layout: dict[str, Any]) -> float:
    return (kept(layout, 3) - kept(layout, 1)) / 2


@pytest.mark.parametrize(
    ("layout", "share"),
    [
        ({}, Fraction(16)),
        ({"scheme": "megatron", "cols": 4}, 4 + Fraction(12, 4)),
        ({"scheme": "megatron", "cols": 4, "sequence_parallel": True}, 2 + Fraction(14, 4)),
        ({"scheme": "optimus", "rows": 2, "cols": 2}, Fraction(16, 4)),
        ({"scheme": "optimus", "rows": 2, "cols": 3}, Fraction(16, 6)),
    ],
    ids=["single", "megatron", "sequence", "optimus-2x2", "optimus-2x3"],
)
def test_kept_for_backward(pool: WorkerPool, layout: dict[str, Any], share: Fraction) -> None:
    """Statistics (a number or two a token and head) come on top of the table's terms."""
    for elements in pool.run(LayoutConfig(**layout).n_processes, one_layer, layout):
        assert elements / BSH == pytest.approx(float(share), rel=0.06)
        assert elements >= share * BSH
