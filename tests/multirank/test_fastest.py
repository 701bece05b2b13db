"""Choices made by the seconds of a cluster give the same numbers as one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gridformer.config import LayoutConfig
from gridformer.config.reading import configs_dir
from gridformer.parallel.auto.heuristics import decide
from tests.support.multirank.exactness import assert_equal_one_device, tiny
from tests.support.multirank.matrix import MODELS, SETTINGS
from tests.support.multirank.pool import WorkerPool

GRID: dict[str, Any] = {"scheme": "optimus", "rows": 2, "cols": 2}


def test_choices_on_slow_links_equal_one_device(pool: WorkerPool, tmp_path: Path) -> None:
    file = configs_dir() / "clusters" / "frontera-rtx5000.yaml"
    raw: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    del raw["host"]["link_gbps"]
    raw["host"] = {key: {"value": 0, "source": "a test"} for key in raw["host"]}
    for level in raw["levels"]:  # so slow that messages of tiny models are worth hiding
        level["bandwidth_gbps"]["value"], level["latency_us"]["value"] = 1e-3, 0
    path = tmp_path / "slow.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    layout = {**GRID, "cluster": str(path)}
    model = MODELS["T5"]
    choices = decide(tiny(**model), LayoutConfig(**layout))
    assert any(choice != choices.timed[name].by_rules for name, choice in choices.products.items())
    assert_equal_one_device(pool, layout, model, SETTINGS)
