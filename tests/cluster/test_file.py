"""Cluster files: those that ship can be read, and what is wrong in one is named with a remedy."""

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


def raw_file() -> Any:
    path = configs_dir() / "clusters" / "dgx-h100.yaml"
    return {"name": "mine", **yaml.safe_load(path.read_text(encoding="utf-8"))}


def test_all_problems_of_a_file_are_listed_with_what_would_be_valid(tmp_path: Path) -> None:
    raw = raw_file()
    raw["device"]["memory_gb"] = raw["device"].pop("memory_gib")
    del raw["levels"][0]["latency_us"]["source"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError) as caught:
        load_cluster(tmp_path / "mine.yaml")
    text = str(caught.value)
    assert "device.memory_gib: is missing" in text
    assert "device.memory_gb: unknown key: did you mean 'memory_gib'?" in text
    assert "levels.0.latency_us.source: is missing" in text


NUMBER = {"value": 0.5, "source": "a test", "data": "none", "identified": False}
ZERO = "value is 0, but times are divided by it"


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("device", "memory_gbps", "value"), 0, f"device.memory_gbps: {ZERO}"),
        (("device", "n_processors", "value"), 0, f"device.n_processors: {ZERO}"),
        (("device", "peak_tflops", "bfloat16", "value"), 0, f"peak_tflops.bfloat16: {ZERO}"),
        (("levels", 1, "bandwidth_gbps", "value"), 0, f"levels.1.bandwidth_gbps: {ZERO}"),
        (("levels", 1, "bandwidth_gbps", "value"), float("inf"), "must be a finite number"),
        (("levels", 1, "bandwidth_gbps", "value"), "fast", "value: must be a number"),
        (("host", "link_gbps", "value"), 0, f"host.link_gbps: {ZERO}"),
        (("fitted", "memory_efficiency", "value"), 0, "memory_efficiency is 0, .*: use 0.75"),
        (("fitted",), {"products_efficiency": NUMBER}, "did you mean 'product_efficiency'"),
        (("levels", 1, "size"), 12, "multiple of the 8 of level node, such as 16"),
    ],
)
def test_a_wrong_value_is_answered_with_what_works(
    keys: tuple[str | int, ...], value: object, said: str
) -> None:
    raw = here = raw_file()
    for key in keys[:-1]:
        here = here[key]
    here[keys[-1]] = value
    with pytest.raises(ConfigError, match=said):
        parse_cluster(raw, "mine")


def test_a_file_need_not_state_the_link_to_the_host_nor_fitted_numbers() -> None:
    raw = raw_file()
    assert parse_cluster(raw, "mine").link_gbps == 63
    del raw["host"]["link_gbps"]
    cluster = parse_cluster(raw, "mine")
    assert (cluster.link_gbps, cluster.number("slowdown_per_node")) == (15.75, 0)
    assert with_fitted(cluster, {"product_efficiency": 0.5}).number("product_efficiency") == 0.5


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
