"""What a prediction says about the numbers that it rests on."""

from __future__ import annotations

import pytest

from gridformer.cluster import load_cluster
from gridformer.plan.price import doubts


@pytest.mark.parametrize(("devices", "warned"), [(64, False), (68, True), (256, True)])
def test_what_was_fitted_to_few_nodes_is_not_extrapolated_in_silence(
    devices: int, warned: bool
) -> None:
    """Frontera's rows are from at most 16 nodes of 4 devices."""
    text = "slowdown_per_node of frontera-rtx5000 was fitted to runs on at most 16 nodes"
    said = doubts(load_cluster("frontera-rtx5000"), devices)
    assert [f"for {devices // 4} nodes" in one for one in said if one.startswith(text)] == (
        [True] if warned else []
    )


@pytest.mark.parametrize(
    ("cluster", "devices", "expected"),
    [
        ("lassen-v100", 1, "product_efficiency (0.8), memory_efficiency (0.75) of lassen-v100"),
        (
            "lassen-v100",
            8,
            "product_efficiency (0.8), memory_efficiency (0.75), inner_efficiency (0.75), "
            "outer_efficiency (0.8) of lassen-v100",
        ),
        ("dgx-h100", 8, None),  # its file has no number for links between nodes
        ("dgx-h100", 16, "outer_efficiency (0.8) of dgx-h100"),
    ],
)
def test_numbers_that_were_not_fitted_are_named_once(
    cluster: str, devices: int, expected: str | None
) -> None:
    said = [one for one in doubts(load_cluster(cluster), devices) if "any data" in one]
    verb = "were" if expected and "," in expected else "was"
    assert said == ([f"{expected} {verb} not fitted to any data"] if expected else [])
    assert not any("by nothing" in one for one in doubts(load_cluster(cluster), devices))


def test_what_is_to_be_said_of_several_numbers_is_said_once() -> None:
    inner = "product_efficiency, memory_efficiency, inner_efficiency of dgx-h200 are not determined"
    assert [one.startswith(inner) for one in doubts(load_cluster("dgx-h200"), 8)] == [True]
