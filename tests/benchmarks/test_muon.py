"""The page about Muon: means of losses, and the table of times."""

import pytest
from benchmarks.muon import _smooth, _table


def test_a_loss_is_the_mean_of_up_to_ten_steps() -> None:
    rows = [{"loss": float(i)} for i in range(12)]
    assert _smooth(rows)[:2] == [0.0, 0.5]
    assert _smooth(rows)[-1] == pytest.approx(sum(range(2, 12)) / 10)


def test_times_are_in_milliseconds_and_relative_to_adamw() -> None:
    assert "| one process | 200.0 | 300.0 | 1.50 |" in _table({"one process": [0.2, 0.3]})
