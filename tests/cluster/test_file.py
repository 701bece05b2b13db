"""Cluster files: those that ship can be read, and what is wrong in one is named with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.planner.fitting import with_fitted

from gridformer.cluster.file import cluster_names, load_cluster, parse_cluster
from gridformer.config import configs_dir, parse_run
from gridformer.parallel.validation import check_layout
from gridformer.utils.errors import ConfigError


def test_every_shipped_cluster_is_valid_and_every_number_has_a_source() -> None:
    assert {"frontera-rtx5000", "lassen-v100", "dgx2h-v100", "selene-a100"} <= {*cluster_names()}
    assert {"dgx-h100", "dgx-h200", "gb200-nvl72"} <= {*cluster_names()}
    for name in cluster_names():
        cluster = load_cluster(name)
        assert cluster.name == name
        assert 0 < cluster.limit_gib < cluster.device.memory_gib.value
        assert cluster.size > cluster.node_size
        assert all(level.source != "not stated" for level in cluster.levels)
        assert cluster.host.link_gbps is not None


def test_a_name_that_does_not_exist_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'dgx-h100'"):
        load_cluster("dgx-h10")


def test_all_problems_of_a_file_are_listed_with_what_would_be_valid(tmp_path: Path) -> None:
    path = configs_dir() / "clusters" / "dgx-h100.yaml"
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    raw["device"]["memory_gb"] = raw["device"].pop("memory_gib")
    del raw["levels"][0]["latency_us"]["source"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError) as caught:
        load_cluster(tmp_path / "mine.yaml")
    text = str(caught.value)
    assert "device.memory_gib: is missing" in text
    assert "device.memory_gb: unknown key: did you mean 'memory_gib'?" in text
    assert "levels.0.latency_us.source: is missing" in text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("device", "memory_gbps"), "device.memory_gbps: value is 0, but times are divided by it"),
        (("device", "n_processors"), "device.n_processors: value is 0"),
        (("device", "peak_tflops", "bfloat16"), "device.peak_tflops.bfloat16: value is 0"),
        (("levels", 1, "bandwidth_gbps"), "levels.1.bandwidth_gbps: value is 0"),
        (("host", "link_gbps"), "host.link_gbps: value is 0"),
        (("fitted", "memory_efficiency"), "memory_efficiency is 0, .*: use 0.75"),
    ],
)
def test_a_number_that_divides_is_above_zero(keys: tuple[str | int, ...], said: str) -> None:
    path = configs_dir() / "clusters" / "dgx-h100.yaml"
    raw: Any = {"name": "mine", **yaml.safe_load(path.read_text(encoding="utf-8"))}
    figure = raw
    for key in keys:
        figure = figure[key]
    for value, why in ((0, said), (float("inf"), "should be a finite number")):
        figure["value"] = value
        with pytest.raises(ConfigError, match=why):
            parse_cluster(raw, "mine")


def test_a_file_need_not_state_the_link_to_the_host() -> None:
    path = configs_dir() / "clusters" / "dgx-h100.yaml"
    raw = {"name": "mine", **yaml.safe_load(path.read_text(encoding="utf-8"))}
    assert parse_cluster(raw, "mine").link_gbps == 63
    del raw["host"]["link_gbps"]
    assert parse_cluster(raw, "mine").link_gbps == 15.75


def test_fitted_numbers_are_few_and_known() -> None:
    path = configs_dir() / "clusters" / "dgx-h100.yaml"
    raw = {"name": "mine", **yaml.safe_load(path.read_text(encoding="utf-8"))}
    number = {"value": 0.5, "source": "a test", "data": "none", "identified": False}
    with pytest.raises(ConfigError, match="did you mean 'product_efficiency'"):
        parse_cluster({**raw, "fitted": {"products_efficiency": number}}, "mine")
    cluster = with_fitted(load_cluster("dgx-h100"), {"product_efficiency": 0.5})
    assert cluster.number("product_efficiency") == 0.5
    assert cluster.number("slowdown_per_node") == 0


def test_levels_must_contain_each_other() -> None:
    path = configs_dir() / "clusters" / "dgx-h100.yaml"
    raw = {"name": "mine", **yaml.safe_load(path.read_text(encoding="utf-8"))}
    raw["levels"][1]["size"] = 12
    with pytest.raises(ConfigError, match="multiple of the 8 of level node, such as 16"):
        parse_cluster(raw, "mine")


def test_local_is_the_file_that_calibrate_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no local.yaml here: `gridformer calibrate` measures"):
        load_cluster("local")
    (tmp_path / "local.yaml").write_text(
        (configs_dir() / "clusters" / "dgx-h100.yaml").read_text(encoding="utf-8")
    )
    assert load_cluster("local").device == load_cluster("dgx-h100").device
    again = (configs_dir() / "clusters" / "selene-a100.yaml").read_text(encoding="utf-8")
    (tmp_path / "local.yaml").write_text(again)
    assert load_cluster("local").device == load_cluster("selene-a100").device, "it has changed"
    layout = {"scheme": "megatron", "cols": 2, "cluster": "local"}
    check_layout(parse_run({"model": "gpt2-124m", "data": {"path": "."}, "layout": layout}))
