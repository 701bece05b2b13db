"""With updates in the backward pass under D&SP-cSub, all sub-grids send in the same order.

The first sub-grid computes more than the others, which may hold no parameter of a layer at all. The
norms of layers are all-reduced over both, between the sections' own messages: if one side reached
them earlier than the other, each would wait for the other until the timeout.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.marks import full_unless
from tests.support.multirank.exactness import IN_BACKWARD, assert_equal_one_device
from tests.support.multirank.layouts import Layout
from tests.support.multirank.matrix import SETTINGS
from tests.support.multirank.pool import WorkerPool

CSUB: Layout = {"scheme": "subgraph", "branches": 2, "common": "first"}
COMMON = {"feed_forward": "common"}
OUTSIDE = {"attention": "outside", **COMMON}  # the other sub-grids hold nothing of a layer
FULL = {"recompute": "full"}
POST = {"family": "transformer", "label_smoothing": 0.1}

# A layout, training settings, and a model.
CASES: dict[str, tuple[Layout, dict[str, Any], dict[str, Any]]] = {
    "recomputed": (COMMON, FULL, {}),
    "recomputed, norms after residuals": ({}, FULL, POST),
    "recomputed, fsdp": ({**COMMON, "dp": 2, "dp_mode": "fsdp"}, FULL, {}),
    "no parameters": (OUTSIDE, {}, {}),
    "no parameters, pipeline": ({**OUTSIDE, "pp": 2, "micro_batches": 2}, {}, {}),
    "no parameters, replicas": ({**OUTSIDE, "dp": 2}, {}, {}),
    "no parameters, zero1": ({**OUTSIDE, "dp": 2, "dp_mode": "zero1"}, FULL, {}),
}
QUICK = ("recomputed", "no parameters, pipeline", "no parameters, replicas")


@pytest.mark.parametrize("name", full_unless(QUICK.__contains__, CASES))
def test_equals_one_device(pool: WorkerPool, name: str) -> None:
    layout, train, model = CASES[name]
    model = {"n_layers": 2, "max_seq_len": 12, "dropout": 0.1, **model}
    settings = {**SETTINGS, **IN_BACKWARD, **train}
    assert_equal_one_device(pool, {**CSUB, **layout}, model, settings)
