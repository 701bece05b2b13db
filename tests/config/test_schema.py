"""The schemas by which editors check run and cluster files say what gridformer itself says."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from gridformer.cluster.file import cluster_schema, load_cluster
from gridformer.config import configs_dir, parse_run
from gridformer.config.schema import run_schema
from gridformer.utils.errors import ConfigError
from tests.support.commands import gridformer_here

SCHEMAS = {"run": run_schema(), "cluster": cluster_schema()}
FILES = [*(configs_dir() / "runs").glob("*.yaml"), *(configs_dir() / "clusters").glob("*.yaml")]
SMALL = {"n_layers": 1, "hidden_size": 8, "n_heads": 2}
DATA = {"path": "tokens"}


def valid(kind: str, values: Any) -> bool:
    return Draft202012Validator(SCHEMAS[kind]).is_valid(values)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_shipped_schemas_are_what_the_command_prints(kind: str) -> None:
    """If keys have changed: gridformer schema --file KIND > configs/schemas/KIND.json."""
    Draft202012Validator.check_schema(SCHEMAS[kind])
    printed = gridformer_here("schema", "--file", kind).stdout
    assert printed == (configs_dir() / "schemas" / f"{kind}.json").read_text(encoding="utf-8")
    assert json.loads(printed) == SCHEMAS[kind]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_files_name_their_schema_and_follow_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    name = text.partition("$schema=")[2].splitlines()[0]
    assert (path.parent / name).is_file()
    assert valid(Path(name).stem, yaml.safe_load(text))


@pytest.mark.parametrize(
    "run",
    [
        {"model": "demo-4m", "data": DATA},
        {"model": {"name": "demo-4m", "dropout": 0.1}, "data": [{"path": "a", "weight": 2}]},
        {"model": SMALL, "data": DATA, "layout": {"scheme": "optimus", "rows": 2}},
        {"model": {"factory": "package.module:function"}, "data": DATA},
    ],
    ids=lambda run: str(run["model"]),
)
def test_runs_in_every_form_follow_the_schema(run: dict[str, Any]) -> None:
    assert valid("run", run)


@pytest.mark.parametrize(
    "run",
    [
        {"model": "demo-4m"},
        {"model": {"n_layers": 1, "hidden_size": 8}, "data": DATA},
        {"model": SMALL, "data": DATA, "lay_out": {}},
        {"model": SMALL, "data": DATA, "layout": {"scheme": "optimum"}},
        {"model": SMALL, "data": DATA, "layout": {"rows": 0}},
        {"model": SMALL, "data": DATA, "train": {"stepz": 10}},
        {"model": SMALL, "data": DATA, "train": {"steps": "ten"}},
    ],
    ids=str,
)
def test_mistakes_are_mistakes_for_both(run: dict[str, Any]) -> None:
    assert not valid("run", run)
    with pytest.raises(ConfigError):
        parse_run(run)


@pytest.mark.parametrize("key", ["device", "levels", "host"])
def test_a_cluster_without_a_part_is_a_mistake_for_both(key: str, tmp_path: Path) -> None:
    path = configs_dir() / "clusters" / "dgx-h100.yaml"
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    del values[key]
    assert not valid("cluster", values)
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError):
        load_cluster(tmp_path / "cluster.yaml")
