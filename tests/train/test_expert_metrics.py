"""What runs with experts say about their balance: in metrics.jsonl, on the terminal, in reports."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gridformer.config import ModelConfig, parse_run
from gridformer.config.reading import shipped_model
from gridformer.mesh.process_group import World
from gridformer.models import build_model, count_parameters, describe_parameters
from gridformer.report import figures
from gridformer.report.estimates import Estimates
from gridformer.report.page import write_report_page
from gridformer.report.reading import RunReading, read_runs
from gridformer.report.summary import summary
from gridformer.train.metrics import expert_metrics, read_metrics
from gridformer.train.trainer import Trainer
from tests.support.multirank.runs import plan_for

MODEL: dict[str, Any] = {
    **{"family": "llama", "n_layers": 3, "hidden_size": 16, "n_heads": 2, "max_seq_len": 16},
    **{"vocab_size": 301, "n_experts": 5, "experts_per_token": 2, "expert_size": 8},
    **{"dense_layers": 1, "balance_loss": 0.1},
}


def test_a_run_writes_the_shares_of_experts(
    token_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard, which takes numbers only, is among its loggers."""
    train = {"steps": 2, "global_batch": 4, "eval_batches": 1, "warmup_steps": 0}
    data = {"path": str(token_folder), "seq_len": 16}
    run = parse_run({"model": MODEL, "data": data, "train": train})
    world = World(0, 0, 1, torch.device("cpu"), "gloo", "test")
    Trainer(plan_for(run, tmp_path), world).fit()
    said = capsys.readouterr().out
    _, *lines = read_metrics(tmp_path)
    for line in lines:
        shares = torch.tensor(line["experts"], dtype=torch.float64)
        assert shares.shape == (2, 5)
        assert shares.sum(1).tolist() == pytest.approx([1, 1], abs=1e-4)
        chosen = shares * 4 * 16 * 2  # tokens of the batch, and 2 experts for each
        assert chosen.tolist() == [pytest.approx(row.round().tolist(), abs=0.01) for row in chosen]
        assert line["experts_fullest"] == pytest.approx(5 * shares.max().item(), abs=1e-4)
        assert line["experts_idle"] == (shares == 0).double().mean().item()
        assert line["loss"] == pytest.approx(line["loss_tokens"] + line["loss_balance"])
    assert f"  experts {lines[-1]['experts_fullest']:.1f}x  " in said


def test_many_experts_are_written_in_some_steps() -> None:
    counts = [[1] * 255 + [0], [2] * 128 + [0] * 128, [1] * 256]
    found = [expert_metrics(counts, step) for step in range(5)]
    assert ["experts" in line for line in found] == [True, False, True, False, True]
    assert [line["experts_fullest"] for line in found] == [2.0] * 5
    assert [line["experts_idle"] for line in found] == pytest.approx([129 / 768] * 5)
    assert expert_metrics([], 0) == {}


def reading(tmp_path: Path, n_layers: int) -> RunReading:
    """Read a run whose last layer gets ever more even, and some lines that no run writes."""
    lines = [
        {"step": step, "loss": 3.0, **expert_metrics([[3, 1]] * (n_layers - 1) + [[9, step]], 0)}
        for step in range(1, 4)
    ]
    wrong = ["x", [], [[]], [["x", 1]], [[0.5, -1]], [[0, 0]], [[1e999, 1]], [{}], [[0.5, 0.5]]]
    lines += [{"step": 4 + number, "experts": one} for number, one in enumerate(wrong)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_runs([tmp_path])[0]


@pytest.mark.parametrize("n_layers", [2, 60])
def test_the_report_shows_each_layer(tmp_path: Path, n_layers: int) -> None:
    run = reading(tmp_path, n_layers)
    rows = {name: values[0] for name, values in summary([run])}
    assert rows["fullest expert"] == "1.65 times the mean load (last 3 steps)"
    assert rows["experts without tokens"] == "0.0%"
    titles = [chart.title for chart in figures.chart_list([run])]
    assert titles == ["Loss", "Fullest expert", "Experts without tokens"]
    write_report_page([run], [Estimates()], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    data = json.loads(text.partition('id="figures">')[2].partition("</script>")[0])
    curves = [one for one in data["experts-0"]["data"] if one["mode"] == "lines"]
    assert [one["name"] for one in curves] == [f"layers.{n}" for n in range(n_layers)]
    assert all(one["x"] == [1, 2, 3] for one in curves)
    assert [one["y"] for one in curves[:1]] == [[1.5] * 3]
    assert curves[-1]["y"] == pytest.approx([18 / 10, 18 / 11, 18 / 12], rel=1e-4)
    assert any(one["showlegend"] for one in curves) == (n_layers == 2)
    bars = [one for one in data["experts-0"]["data"] if "colorbar" in one.get("marker", {})]
    assert len(bars) == (n_layers == 60)


def test_parameters_of_experts_count_for_the_tokens_that_pass_them() -> None:
    mixtral = ModelConfig.model_validate(shipped_model("mixtral-8x7b"))
    assert describe_parameters(mixtral) == "46.7B parameters, 12.9B for each token"
    config = ModelConfig.model_validate({**MODEL, "n_layers": 7, "dense_layers": 4})
    with torch.device("meta"):
        whole = build_model(config)
    assert count_parameters(config) == sum(p.numel() for p in whole.parameters())
