"""Named sets of a run: which names it has, and what is refused before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gridformer.config import RunConfig, parse_run
from gridformer.data import RunData, resolve
from gridformer.evaluate.examples import check_named_set, named_sets
from gridformer.utils.errors import ConfigError, DataError


def a_run(data: dict[str, Any], **layout: int) -> RunConfig:
    model = {"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 24}
    return parse_run(
        {"model": model, "data": data, "train": {"global_batch": 8}, "layout": {**layout}}
    )


def test_names(token_folder: Path) -> None:
    assert [*named_sets(a_run({"path": str(token_folder)}))] == ["val"]
    run = a_run(
        {
            "path": str(token_folder),
            "validation": [{"name": "wiki", "path": "w"}, {"name": "web", "path": "v"}],
            "test": [{"name": "web", "path": "x"}, {"name": "code", "path": "y"}],
        }
    )
    found = {name: str(one.path) for name, one in named_sets(run).items()}
    assert found == {"wiki": "w", "web": "v", "test/web": "x", "code": "y"}


def test_refusals(token_folder: Path, tmp_path: Path) -> None:
    def checked(name: str, **layout: int) -> None:
        data = {"path": str(token_folder), "test": [{"name": "gone", "path": str(token_folder)}]}
        run = a_run(data, **layout)
        run = resolve(run, RunData.open(run.data))
        if name == "gone":  # since it was trained
            gone = run.data.test[0].model_copy(update={"path": tmp_path / "gone"})
            run = run.model_copy(update={"data": run.data.model_copy(update={"test": (gone,)})})
        check_named_set(name, run)

    checked("val")
    checked("val", dp=2)
    with pytest.raises(ConfigError, match="--set vall: the run has no such set: did you mean"):
        checked("vall")
    with pytest.raises(ConfigError, match="no such set; use one of val, gone"):
        checked("web")
    with pytest.raises(ConfigError, match=r"does not divide over layout.dp \(3\).*use layout.dp=2"):
        checked("val", dp=3)
    with pytest.raises(DataError, match="gone: no such token folder"):
        checked("gone")
