"""What is read from a run directory, also from a damaged one."""

import json
from pathlib import Path
from typing import Any

import pytest

from gridformer.report.figures import chart_list, decimated
from gridformer.report.reading import marks_of, read_runs, settings_table, short_labels
from gridformer.report.summary import summary
from gridformer.utils.errors import UserError

METRICS: list[dict[str, Any]] = [
    {"step": 0, "tokens": 0, "val_loss": 5.5},
    {"step": 1, "loss": 5.4, "grad_norm": 1.5, "lr": 1e-3, "tokens": 64, "tokens_per_s": 100.0},
    {"step": 2, "left_out": "row 3 of the batch", "tokens": 128},
    {"step": 3, "loss": 5.0, "lr": 1e-3, "tokens": 192, "val_loss": 5.1, "val_accuracy": 0.25},
]


def run_folder(folder: Path, name: str = "run", rows: int = 1) -> Path:
    """Write the files of a run."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"name: {name}\n"
        "model: {family: gpt2, n_layers: 1, hidden_size: 8, n_heads: 2, vocab_size: 32}\n"
        "data: {path: /home/someone/secret/tokens}\n"
        f"layout: {{scheme: megatron, rows: {rows}}}\n"
        "train: {steps: 4}\n"
    )
    text = "".join(json.dumps(line) + "\n" for line in METRICS)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_what_is_damaged_is_left_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'[1]\n\xff\xfe\n{"step": "4"}\n{"step": true}\n{"step": -1}\n' + b"[" * 9999)
        file.write(b'\n{"step": 4, "loss": NaN, "lr": 1e999}\n{"step": 5, "loss": 4.')
    (folder / "heartbeat.json").write_text("{")
    (folder / "events.jsonl").write_text('{"event": 3}\n{"event": "saved", "step": "x"}\n')
    [run] = read_runs([folder])
    assert run.series("loss") == ([1, 3], [5.4, 5.0])
    assert (run.last_step, run.state, marks_of(run)) == (4, "", [])


def test_numbers_and_charts_of_a_run(tmp_path: Path) -> None:
    [run] = read_runs([run_folder(tmp_path / "run")])
    rows = {name: values[0] for name, values in summary([run])}
    assert rows["validation loss"] == "5.1 (perplexity 164)"
    assert rows["steps"] == "3 of 4"
    assert rows["steps left out"] == "1"
    assert [chart.title for chart in chart_list([run])] == [
        "Loss", "Validation accuracy", "Learning rate", "Gradient norm", "Speed",
    ]  # fmt: skip


def test_saves_are_at_their_steps_and_all_layouts_are_named(tmp_path: Path) -> None:
    """Metrics tell of a save in a later step, and never of the last one of a start."""
    folder = run_folder(tmp_path / "run")
    lines = [*METRICS[:3], {**METRICS[3], "save_s": 0.5, "save_stall_s": 0.1}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [run] = read_runs([folder])
    assert run.series("save_s") == ([3], [0.5]), "without events, what metrics say"
    events: list[dict[str, object]] = [
        {"event": "start", "step": 0, "layout": "single device"},
        {"event": "saved", "step": 2, "seconds": 0.5, "stalled_s": 0.1},
        {"event": "start", "step": 2, "layout": "optimus 2x1"},
        {"event": "start", "step": 2, "layout": "optimus 2x1"},
        {"event": "saved", "step": 3, "seconds": 0.7},
        {"event": "start", "step": 3, "layout": ["x"]},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    [run] = read_runs([folder])
    assert run.series("save_s") == ([2, 3], [0.5, 0.7])
    assert run.series("save_stall_s") == ([2], [0.1])
    rows = {name: values[0] for name, values in summary([run])}
    assert rows["layout"] == "single device, then optimus 2x1, then megatron 1x1"
    assert [*map(run.where, (2, 3, 4))] == [" on single device", " on optimus 2x1", ""]


def test_losses_and_loads_are_means_of_the_last_steps(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(4, 34):
            line = {"step": step, "loss": 9.0 if step < 14 else 4.0, "experts_idle": 0.0}
            line["val_loss"] = 5.0 if step == 20 else 6.0
            file.write(json.dumps(line | {"experts_fullest": 8.0 if step < 14 else 2.0}) + "\n")
    start = '{"event": "start", "step": 0}\n'
    for n_starts in (1, 2):
        (folder / "events.jsonl").write_text(start * n_starts)
        rows = {name: values[0] for name, values in summary(read_runs([folder]))}
        assert rows["training loss"] == "4 (mean of the last 20 steps)"
        assert rows["lowest validation loss"] == "5 at step 20"
        assert rows["fullest expert"] == "2 times the mean load (last 20 steps)"
        assert rows.get("starts") == (None if n_starts == 1 else "2")


def test_scores_of_numbers_have_no_perplexity(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    text = (folder / "config.yaml").read_text()
    text = text.replace("gpt2,", "bert, n_labels: 1, token_head: false,")
    (folder / "config.yaml").write_text(text.replace("data: {", "data: {task: regression, "))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "val_loss": 0.5, "val_pearson": 0.25}\n')
    [run] = read_runs([folder])
    assert run.config is not None
    rows = {name: values[0] for name, values in summary([run])}
    assert (rows["validation loss"], rows["validation Pearson"]) == ("0.5", "0.25")
    assert chart_list([run])[0][:2] == ("Loss", "mean squared error")


def test_only_settings_that_differ_are_listed_and_no_path_of_the_machine(tmp_path: Path) -> None:
    runs = read_runs([run_folder(tmp_path / "a", "a"), run_folder(tmp_path / "b", "b", 2)])
    differing = dict(settings_table(runs, differing=True))
    assert differing == {"name": ["a", "b"], "layout.rows": ["1", "2"]}
    assert dict(settings_table(runs, differing=False))["data.path"] == [".../tokens"] * 2


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    run_folder(tmp_path / "runs" / "mine")
    with pytest.raises(UserError, match=r"no run directory; .*runs/mine is one"):
        read_runs([tmp_path / "runs"])
    with pytest.raises(UserError, match="is no folder: name a run directory"):
        read_runs([tmp_path / "runs" / "mine" / "metrics.jsonl"])


def test_labels_are_short_and_differ() -> None:
    assert short_labels([Path("runs/a"), Path("runs/b")]) == ["a", "b"]
    assert short_labels([Path("x/run"), Path("y/run")]) == ["x/run", "y/run"]
    assert len({*short_labels([Path("a"), Path("a")])}) == 2


def test_few_points_keep_every_spike() -> None:
    values = [0.0] * 10_000
    values[1234], values[7777] = 9.0, -9.0
    kept = decimated(values, 100)
    assert len(kept) <= 100
    assert {0, 1234, 7777, 9_999} <= {*kept}
    assert decimated(values[:50], 100) == [*range(50)]
