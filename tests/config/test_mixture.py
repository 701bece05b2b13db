"""Mixtures in the `data` section: sources, weights, stages and validation sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gridformer.config import RunConfig, parse_run
from gridformer.config.mixture import whole_weights

TWO = [{"path": "data/web", "weight": 0.7}, {"path": "more/code files", "weight": 0.3}]


def a_run(data: Any, *overrides: str) -> RunConfig:
    return parse_run({"model": "demo-4m", "data": data}, overrides)


def test_a_list_is_a_mixture_whose_sources_are_named_after_their_folders() -> None:
    run = a_run(TWO, "data.seq_len=8")
    found = [(one.name, one.path, one.weight) for one in run.data.train_sources]
    assert found == [("web", Path("data/web"), 0.7), ("code-files", Path("more/code files"), 0.3)]
    assert run.data.seq_len == 8
    assert [(one.name, one.path, one.split) for one in run.data.validation_sets] == [
        ("web", Path("data/web"), "val"),
        ("code-files", Path("more/code files"), "val"),
    ]
    assert parse_run(yaml.safe_load(run.to_yaml())) == run


def test_a_path_is_one_source_without_a_name() -> None:
    data = a_run({"path": "x"}).data
    assert [(one.name, one.path) for one in data.train_sources] == [("", Path("x"))]
    assert [(one.name, one.path) for one in data.validation_sets] == [("", Path("x"))]
    mixed = a_run({"path": "x"}, "data.path=null", "data.sources=[{path: a}, {path: b}]").data
    assert [one.name for one in mixed.train_sources] == ["a", "b"]


def test_a_validation_set_takes_the_folder_of_a_source_by_its_name() -> None:
    data = a_run({"sources": TWO, "validation": [{"name": "web"}, {"path": "x", "split": "train"}]})
    found = [(one.name, one.path, one.split) for one in data.data.validation_sets]
    assert found == [("web", Path("data/web"), "val"), ("x", Path("x"), "train")]


def test_test_sets_are_named_like_validation_sets() -> None:
    data = a_run({"sources": TWO, "test": [{"name": "web"}, {"path": "held/out"}]}).data
    assert [(one.name, one.path) for one in data.test_sets] == [
        ("web", Path("data/web")),
        ("out", Path("held/out")),
    ]
    assert a_run({"path": "x"}).data.test_sets == ()


def test_weights_are_exact_as_they_are_written() -> None:
    assert whole_weights([0.1, 0.2, 0.7]) == (1, 2, 7)
    assert whole_weights([1.0, 1.0, 1.0]) == (1, 1, 1)
    assert whole_weights([30.0, 0.0, 1e-2]) == (3000, 0, 1)
