"""The page: complete, alone, and safe to open whatever a run contains."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gridformer.config import parse_run
from gridformer.report.estimates import Estimates, estimates_of
from gridformer.report.page import write_report_page
from gridformer.report.reading import RunReading, Sample
from gridformer.report.steptrace import PurposeTraffic, read_timeline
from gridformer.train.trace import merged_trace

EVIL = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>"
LABEL = f"{EVIL}\udcff"  # with a byte that is not UTF-8, as Python has it in the name of a folder


def evil_run(folder: Path) -> RunReading:
    """A run whose every text is an attack."""
    metrics = [{"step": step, "loss": 5.0 - step, EVIL: 1.0 * step} for step in range(3)]
    events = [
        {"event": "start", "step": 0, "layout": EVIL, "devices": EVIL, "device": EVIL, "time": 1e9},
        {"event": "diverged", "step": 1, "why": EVIL},
    ]
    return RunReading(
        label=LABEL,
        folder=folder,
        config=None,
        problem=EVIL,
        settings={EVIL: EVIL, "train.lr": [EVIL]},
        metrics=metrics,
        events=events,
        state=EVIL,
        traces=[step_trace(folder)],
        samples=[Sample(3, EVIL, EVIL, EVIL)],
    )


def step_trace(folder: Path) -> Path:
    """Write a timeline: a forward pass of 10 ms, 4 ms of which are waits."""
    part: dict[str, Any] = {
        "host": "a",
        "zero": 100.0,
        "place": {"row": 0},
        "events": [["forward", 0, 0, 100.0, 100.010], [EVIL, -1, -1, 100.012, 100.013]],
        "messages": [
            {
                **{"op": "all_gather", "axis": "row", "ranks": 2, "bytes": 64, "label": EVIL},
                "times": [100.001, 100.002, 100.006],
            }
        ],
    }
    path = folder / "trace-step-7.json"
    path.write_text(json.dumps(merged_trace([part, part])))
    return path


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("evil")
    run = evil_run(folder)
    path = folder / "out" / "page.html"
    write_report_page([run, run], [Estimates(), Estimates()], path)
    return path.read_text()


def test_nothing_from_a_run_becomes_html(page: str) -> None:
    assert "<img" not in page
    own = page.partition('id="figures"')[0]
    assert own.count("<script") == 1
    assert "<a" not in own
    assert "alert(1)" in page  # it is shown as text


def test_the_page_loads_nothing_and_allows_only_its_own_scripts(page: str) -> None:
    scripts = [part.partition("</script>")[0] for part in page.split("<script>")[1:]]
    sums = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(one).decode()}'" for one in sums)
    rules = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src"
    assert f'content="{rules} {allowed}"' in page
    assert len(scripts) == 2


def test_the_figures_are_complete(page: str) -> None:
    data = json.loads(page.partition('id="figures">')[2].partition("</script>")[0])
    first, *others = [one for one in data["curves"]["data"] if not one.get("opacity")]
    assert first["y"] == pytest.approx([5.0, 4.375, 3.673], abs=1e-3)  # smoothed by 0.6
    assert "alert" not in first["name"] or "&lt;" in first["name"]
    assert [one["hovertext"][0][-23:] for one in others if one.get("name", "")[:8] == "restarts"]
    timeline = data["timeline-0"]["data"]
    forward = next(one for one in timeline if one["name"] == "forward")
    assert forward["x"][:2] == [0.0, 10.0]
    assert len(forward["y"]) == 2 * 3  # two processes


def test_waits_do_not_count_as_the_work_in_which_they_are(tmp_path: Path) -> None:
    line = read_timeline(step_trace(tmp_path))
    assert line is not None
    seconds = line.seconds[1]
    assert seconds["forward"] == pytest.approx(0.006)
    assert seconds["waits for row"] == pytest.approx(0.004)
    assert seconds["between"] == pytest.approx(0.002)
    assert [(one.axis, one.op, one.messages, one.bytes) for one in line.traffic] == [
        ("row", "all_gather", 1.0, 64.0)
    ]
    (tmp_path / "trace-step-8.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    assert read_timeline(tmp_path / "trace-step-8.json") is None


def test_a_part_that_takes_no_time_leaves_the_timeline_whole(tmp_path: Path) -> None:
    path = step_trace(tmp_path)
    before, whole = read_timeline(path), json.loads(path.read_text())
    assert before is not None
    pass_ = next(one for one in whole["traceEvents"] if one["name"].startswith("forward"))
    whole["traceEvents"].append({**pass_, "name": "short", "ts": 5e3, "dur": 0})
    path.write_text(json.dumps(whole))
    after = read_timeline(path)
    assert after is not None
    assert after.seconds == before.seconds


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "1" + "0" * 400, "1e300"])
@pytest.mark.parametrize("key", ["ts", "dur", "pid", "bytes"])
def test_a_timeline_whose_numbers_are_no_times_is_left_out(
    key: str, number: str, tmp_path: Path
) -> None:
    path = step_trace(tmp_path)
    text = re.sub(rf'("{key}": )[-+.e\d]+', rf"\g<1>{number}", path.read_text(), count=1)
    assert number in text
    path.write_text(text)
    assert read_timeline(path) is None


def test_many_neighbors_of_a_kind_are_joined(tmp_path: Path) -> None:
    path = step_trace(tmp_path)
    whole = json.loads(path.read_text())
    pass_ = next(one for one in whole["traceEvents"] if one["name"].startswith("forward"))
    for n in range(3000):  # of 1 us, each as far from the next one
        whole["traceEvents"].append({**pass_, "name": "busy", "ts": 2e4 + 2 * n, "dur": 1})
    path.write_text(json.dumps(whole))
    line = read_timeline(path)
    assert line is not None
    busy = [one for one in line.work[pass_["pid"]] if one.kind == "busy"]
    assert 1 <= len(busy) <= 1500
    assert (busy[0].start, busy[-1].end) == (20.0, pytest.approx(25.999))


def test_a_page_without_a_timeline_says_how_to_get_one(tmp_path: Path) -> None:
    traffic = [
        PurposeTraffic("row", "all_gather", "product", 2.0, 64.0),
        PurposeTraffic("row", "reduce", "gradients", 1.0, 0.0),  # as its root
    ]
    estimates = [Estimates(traffic=traffic)]
    write_report_page([RunReading("a", tmp_path, None)], estimates, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text().partition("<script")[0]
    assert "train.trace_step=N" in page
    assert "a, rank 0 by its code: 2 messages, 64 bytes" in page
    assert "gradients" not in page


def test_estimates_of_a_run_without_its_data() -> None:
    model = {"family": "gpt2", "n_layers": 2, "hidden_size": 16, "n_heads": 2, "vocab_size": 64}
    layout = {"scheme": "megatron", "cols": 2}
    run = parse_run({"model": {**model, "max_seq_len": 8}, "data": {"path": "x"}, "layout": layout})
    found = estimates_of(run)
    assert found.peak == sum(found.memory.values()) > 0
    [products] = [one for one in found.traffic if one.label == "product"]
    # Two of each layer in either direction, and one of the embedding and of the head.
    activations = 4 * 8 * 8 * 16
    assert (products.axis, products.op, products.messages) == ("col", "all_reduce", 10)
    assert products.bytes == 10 * activations
