"""Mixtures of experts: published rows as runs, their units, and measured ratios."""

import pytest
from benchmarks.experts import APART, table
from benchmarks.published.experts import flop_per_token, published_rate, read_rows, run_of


def test_rows_are_layouts_of_as_many_devices_whose_experts_lie_on_ep_of_them() -> None:
    rows = read_rows()
    runs = [(row, run_of(row)) for row in rows if not row["why_not"]]
    assert len(runs) > 30
    assert len(rows) > len(runs)
    assert all(row["source"].startswith("https://") for row in rows)
    for row, run in runs:
        layout = run.layout
        assert layout.n_processes == int(row["devices"])
        over = layout.experts_over
        sizes = {"cols": layout.cols, "dp": layout.experts_dp or layout.dp}
        on = [sizes[axis] for axis in over]
        assert (on[0] * on[-1] if len(on) == 2 else sum(on) or 1) == int(row["ep"])
        assert ("cols" in over) == (int(row["etp"]) < int(row["tp"]))
        sequences = layout.dp * layout.micro_batches * int(row["micro_batch"])
        assert sequences == run.train.global_batch


def test_published_units_are_those_of_publications_that_give_two() -> None:
    # 245 TFLOP/s and 19.7 s a step; 277 TFLOP/s and 12,040 tokens/s; 487.7 TFLOP/s and 49.3%.
    rows = read_rows()
    qwen = next(row for row in rows if row["value"] == "245")
    assert 2048 * 4096 / 256 / published_rate(qwen) == pytest.approx(19.7, rel=0.015)
    small = next(row for row in rows if row["value"] == "12040")
    assert published_rate(small) * flop_per_token(small) == pytest.approx(277, rel=0.01)
    share = next(row for row in rows if row["value"] == "49.3")
    assert published_rate(share) * flop_per_token(share) == pytest.approx(487.7, rel=0.001)


def test_ratios_are_those_of_steps_of_the_same_round() -> None:
    lines = table({APART: [0.1, 0.2, 0.4], "other": [0.1, 0.4, 0.4]}).splitlines()
    assert lines[-1] == "| other | 400.0 (100.0, 400.0) | 1.00 (1.00, 2.00) |"
