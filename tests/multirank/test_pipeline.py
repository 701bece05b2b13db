"""Pipelines train exactly as one device: every family, scheme and order of micro-batches."""

from __future__ import annotations

from typing import Any

import pytest

from gridformer.config import Family, LayoutConfig
from tests.choosing import full_unless
from tests.multirank.pipelines import Layout, compare, family
from tests.multirank.pool import WorkerPool

def check(pool: WorkerPool, layout: Layout, name: Family, **model: Any) -> None:
    n = LayoutConfig(**layout).n_processes
    for rank, worst in enumerate(pool.run(n, compare, layout, family(name, **model))):
        assert worst["init"] == 0.0, f"rank {rank}: initial weights depend on the layout"
        wrong = {k: v for k, v in worst.items() if not v <= 1e-9}
        assert not wrong, f"rank {rank}: {wrong}"

@pytest.mark.parametrize("name", ["gpt2","bert","t5","transformer"])
@pytest.mark.parametrize("layout", [{"pp":2, "micro_batches":4}])
def test_equals_one_device(pool, layout, name):
    check(pool, layout, name)
