"""What layers cost, by formula and in recorded code; batch limits; loss against wall clock."""

from pathlib import Path

import pytest
from benchmarks.published import costs, limits, loss

from gridformer.cluster.file import load_cluster
from gridformer.parallel.validation import check_layout
from tests.support.fake_gpu import own_process


def counts() -> dict[str, costs.Costs]:
    return {kind: costs.counted(layout) for kind, layout in costs.layouts(2).items()}


def test_layers_cost_what_the_formulas_of_table_1_say() -> None:
    with own_process() as call:
        found = call(counts)
    skipped = 2 * 4 * costs.B * costs.S * costs.H**2 / 4  # the last product, on each of four ranks
    one = costs.flop_formula(4)
    for kind, cost in found.items():
        assert cost.flop == {"forward": one, "recomputation": one - skipped, "backward": 2 * one}, (
            kind
        )
        assert cost.elements["forward"] == costs.formula(kind, 2, "forward")
    for kind in ("megatron", "optimus, the paper's broadcasts"):
        assert found[kind].elements["backward"] == costs.formula(kind, 2, "backward")


def test_trees_move_more_than_rings_and_a_grid_less_than_megatron_on_many_devices() -> None:
    paper = "optimus, the paper's broadcasts"
    assert costs.formula(paper, 8, "forward", tree=True) > costs.formula(paper, 8, "forward")
    assert costs.formula(paper, 8, "forward") < costs.formula("megatron", 8, "forward")
    cluster = load_cluster("frontera-rtx5000")
    shares = [costs.efficiency("megatron", q, 8192, 384, cluster) for q in (2, 8, 32)]
    assert shares == sorted(shares, reverse=True)


def test_layouts_of_the_batch_limits_are_valid_and_the_table_is_relative_to_megatron() -> None:
    for devices in limits.SHAPES:
        for layout in limits.layouts(devices).values():
            check_layout(limits.run_of(layout, devices))
    lines = limits.limit_lines(
        {"megatron": {64: 60}, "optimus, the paper's broadcasts": {64: 480}, "optimus": {64: 600}}
    )
    assert lines[-2].endswith("| 480 (8.0x) | 480 (8x) |")
    assert lines[-1].endswith("| 600 (10.0x) |  |")


def test_curves_of_loss_agree_or_the_command_fails(tmp_path: Path) -> None:
    steps = loss.WARM_UP + loss.COUNTED
    falling = [5 - 4 * i / steps for i in range(steps)]
    step_s = dict(zip(loss.KINDS, (0.5, 2.0)))
    same = [loss.Curve(name, falling, step_s) for name in loss.LAYOUTS]
    assert same[0].reaches(9.0, "one by one") == 2.0
    assert len(loss.curve_lines(same)) == 2 + len(loss.LAYOUTS)
    loss.plot(same, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    other = loss.Curve("other", [one * 1.001 for one in falling], step_s)
    with pytest.raises(ValueError, match=r"other differ by 1\.0e-03"):
        loss.curve_lines([*same, other])
