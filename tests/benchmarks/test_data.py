"""What benchmarks.data reads from a trace."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.data.training import traced_step

from gridformer.train.trace import merged_trace


def test_the_wait_for_data_is_that_of_the_trace(tmp_path: Path) -> None:
    """Of two processes, the second waits 7 ms of a step of 100 ms."""
    parts: list[dict[str, Any]] = []
    for wait in (0.002, 0.007):
        read = [
            ["wait for data", -1, -1, 50.001, 50.001 + wait],
            ["read the batch", -1, -1, 50.0, 50.01],
        ]
        events = [*read, ["forward", 0, 0, 50.02, 50.1]]
        parts.append({"host": "a", "zero": 50.0, "place": {}, "events": events, "messages": []})
    path = tmp_path / "trace-step-3.json"
    path.write_text(json.dumps(merged_trace(parts)))
    found = traced_step(path)
    assert found.step == 3
    assert found.wait_ms == pytest.approx(7.0)
    assert found.length_ms == pytest.approx(100.0)
    del parts[0]["events"][0]
    path.write_text(json.dumps(merged_trace(parts)))
    with pytest.raises(ValueError, match="no row `wait for data` for every process"):
        traced_step(path)
