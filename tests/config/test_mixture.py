"""Mixtures in the `data` section: sources, weights, stages and validation sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gridformer.config import RunConfig, parse_run
from gridformer.config.mixture import whole_weights
from gridformer.utils.errors import ConfigError

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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"path": "x", "sources": TWO},
            "data.path=x and data.sources are both set: use data.path=null with the sources",
        ),
        ([{"path": "a"}, {"path": "b/a"}], "two sources called a: give each a name of its own"),
        ([{"path": "."}], "data.sources.0.name is missing: give the source a name"),
        ([{"path": "a", "name": "x/y"}], "data.sources.0.name: 'x/y' is not a source name"),
        ([{"path": "a", "name": "tokens"}], "tokens is the name of a loss: use another"),
        ([{"path": "a", "wieght": 1}], "unknown key data.sources.0.wieght: did you mean 'weight'"),
        ([{"path": "a", "weight": 0}], "the weights of data.sources are all 0: give at least one"),
        (
            [{"path": "a", "weight": 0.1234567}, {"path": "b", "weight": 0.333333}],
            "repeats only after 4567897 samples, and at most 100000 are kept in memory: use {a: "
            "0.2703, b: 0.7297}",
        ),
        ({"path": "x", "stages": [{"from_step": 9, "weights": {}}]}, "stages needs data.sources"),
        (
            {"sources": TWO, "stages": [{"from_step": 9, "weights": {"webb": 1}}]},
            "data.stages.0.weights names webb, but data.sources has web or code-files",
        ),
        (
            {"sources": TWO, "stages": [{"from_step": n, "weights": {"web": 1}} for n in (9, 9)]},
            "data.stages.1.from_step=9 is not after step 9, with which the stage before it "
            "begins: use 10 or more",
        ),
        (
            {"sources": TWO, "stages": [{"from_step": 9, "weights": {"web": 0}}]},
            "the weights of data.stages.0 are all 0",
        ),
        ({"path": "x", "validation": [{"name": "a"}]}, "data.validation.0.path is missing"),
        (
            {"sources": TWO, "validation": [{"name": "wbe"}]},
            "data.validation.0 names wbe, but data.sources has web or code-files",
        ),
        (
            {"path": "x", "validation": [{"path": "a"}, {"path": "b/a"}]},
            "data.validation has two sets called a",
        ),
        ({"path": "x", "test": [{"path": "a"}, {"path": "b/a"}]}, "data.test has two sets called"),
        ({"path": "x", "test": [{"name": "a"}]}, "data.test.0.path is missing"),
    ],
)
def test_what_does_not_fit_together_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        a_run(data)
    assert message in str(refused.value)
