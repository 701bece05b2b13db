"""What `auto` decides for a run, and what `gridformer train --explain` says about it."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from gridformer.cli.app import app
from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import decide_run, print_decisions


def run_of(layout: dict[str, Any], **train: Any) -> RunConfig:
    sections = {
        "model": {"n_layers": 4, "hidden_size": 512, "n_heads": 8, "vocab_size": 2048},
        "data": {"path": "somewhere", "seq_len": 128},
        "layout": layout,
        "train": {"global_batch": 16, **train},
    }
    return RunConfig.model_validate(sections)


def said(run: RunConfig) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    print_decisions(run, decide_run(run), console)
    return console.export_text()


GRID = {"scheme": "optimus", "rows": 2, "cols": 2}


def test_traffic_equals_the_decisions() -> None:
    """Bytes over rows and columns follow docs/concepts/placement.md; dp reduces gradients."""
    run = run_of({**GRID, "dp": 2, "keep_gathered": "none", "schedule": "broadcast"})
    traffic = decide_run(run).traffic
    tokens, h, v, n = 16 * 128 / 2, 512, 2048, 4
    # forward, and twice as much backward
    assert traffic["col"] == 3 * tokens * (4 * h * n + h) / 4 * 4
    assert traffic["row"] == 3 * (12 * h * h * n + v * h) / 4 * 4
    # 2 (dp - 1) / dp of what one device owns
    assert traffic["dp"] == (12 * h * h * n + v * h) / 4 * 4


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_traffic_of_sharded_replicas(micro_batches: int) -> None:
    """Layers are gathered twice per micro-batch, the table once; both gradients are summed once."""
    grid = {**GRID, "dp": 2, "micro_batches": micro_batches, "keep_gathered": "none"}
    whole, zero1, fsdp = (
        decide_run(run_of({**grid, "dp_mode": mode})) for mode in ("replicate", "zero1", "fsdp")
    )
    h, v, n = 512, 2048, 4
    assert zero1.traffic == whole.traffic
    times = 2 * micro_batches + 1
    assert fsdp.traffic["dp"] == (times * 12 * h * h * n + 2 * v * h) / 2 / 4 * 4
    states = [found.choices.work.state_bytes for found in (whole, zero1, fsdp)]
    assert states == ([16, 10, 8] if micro_batches == 1 else [16, 12, 10])
    assert "gradients and parameters" in said(run_of({**grid, "dp_mode": "fsdp"}))


def test_traffic_depends_on_type_and_micro_batches() -> None:
    whole = decide_run(run_of({**GRID, "keep_gathered": "none"})).traffic
    half = decide_run(run_of({**GRID, "keep_gathered": "none"}, dtype="bfloat16")).traffic
    cut = decide_run(run_of({**GRID, "keep_gathered": "none", "micro_batches": 4})).traffic
    assert half["col"] == whole["col"] / 2
    assert cut["col"] == whole["col"]  # the same tokens
    assert cut["row"] == 4 * whole["row"]  # weights again for each micro-batch
    kept = decide_run(run_of({**GRID, "keep_gathered": "weights", "micro_batches": 4})).traffic
    assert kept["row"] == whole["row"] * (1 + 4) / 3  # once, and a gradient for each micro-batch


def test_explanation_names_every_product_and_reason() -> None:
    text = said(run_of({**GRID, "devices_per_node": 2}))
    for product in ("qkv x4", "out x4", "up x4", "down x4", "head"):
        assert re.search(rf"^{product} ", text, re.MULTILINE), text
    for word in ("stationary:", "schedule:", "keep_gathered:", "a node holds", "MiB"):
        assert word in text
    decided = decide_run(run_of({**GRID, "devices_per_node": 2}))
    assert decided.block is not None
    assert decided.block.describe((1, 1, 2, 2)) in text


def test_numbers_in_the_explanation_are_the_choices() -> None:
    run = run_of({**GRID, "keep_gathered": "none"})
    choices = decide_run(run).choices
    row = next(line for line in said(run).splitlines() if line.startswith("down")).split()
    passes = choices.forward(choices["down"]), choices.backward(choices["down"])
    received = [f"{(t.col + t.row) * 4 / 2**20:.3g}" for t in passes]
    assert row[-4:] == [*(str(t.messages) for t in passes), *received]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("layout", [GRID, {"scheme": "subgraph", "branches": 2}])
def test_every_column_has_a_name_and_fits(layout: dict[str, Any], width: int) -> None:
    run = run_of({**layout, "keep_gathered": "inputs"}, recompute="full")
    console = Console(width=width, record=True, file=io.StringIO())
    print_decisions(run, decide_run(run), console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    head = next(i for i, line in enumerate(lines) if line.startswith("product"))
    assert lines[head].split().count("again") == 2
    for line in lines[head + 1 : head + 6]:
        cells = re.sub(r" x(\d+)", "", line).replace(" x ", "x").split()
        assert len(cells) == len(lines[head].replace("in x out", "size").split()), line


@pytest.mark.parametrize(
    ("m", "head"),
    [
        (1, "1,024 tokens per micro-batch, 1 micro-batch per step, float32"),
        (4, "256 tokens per micro-batch, 4 micro-batches per step, float32"),
    ],
)
def test_the_first_line_says_how_large_micro_batches_are(m: int, head: str) -> None:
    first = said(run_of({"dp": 2, "micro_batches": m})).splitlines()[0]
    assert first == f"custom on dp=2: {head}"


def test_stages_share_the_traffic_and_have_their_own() -> None:
    """Activations travel one way and gradients the other; columns share one tensor."""
    whole = decide_run(run_of({"scheme": "megatron", "cols": 2})).traffic
    run = run_of({"scheme": "megatron", "cols": 2, "pp": 2, "micro_batches": 4})
    traffic = decide_run(run).traffic
    assert traffic["col"] == whole["col"] / 2
    assert traffic["pp"] == 2 * 16 * 128 * 512 / 2 * 4
    text = said(run)
    assert "between stages 4.0 MiB" in text
    assert re.search(r"pipeline: 1f1b.* 25% .*begin at embedding, layers.2", " ".join(text.split()))


def test_one_device_says_so() -> None:
    text = said(run_of({"dp": 2}))
    assert "One device holds the whole model: no product sends anything" in text
    assert "gradients" in text  # those of the two replicas
    stages = said(run_of({"pp": 2, "micro_batches": 2}))
    assert "One device holds a whole pipeline stage: no product" in stages


@pytest.mark.parametrize(
    ("layout", "whole"),
    [({}, "the whole model"), ({"pp": 2, "micro_batches": 2}, "a whole pipeline stage")],
)
def test_a_device_with_a_shard_is_not_said_to_hold_all(layout: dict[str, Any], whole: str) -> None:
    text = " ".join(said(run_of({"dp": 2, "dp_mode": "fsdp", **layout})).split())
    assert f"One device computes {whole}, but gathers each layer's parameters before it" in text
    assert "holds" not in text


@pytest.mark.parametrize("overrides", [[], ["layout.scheme=megatron", "layout.rows=1"]])
def test_command(overrides: list[str], token_folder: Path, tmp_path: Path) -> None:
    """The command starts and writes nothing, and refuses what does not fit."""
    sections = {
        "model": {"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 16},
        "data": {"path": str(token_folder)},
        "layout": GRID,
        "train": {"global_batch": 4},
    }
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(sections))
    done = CliRunner().invoke(app, ["train", str(path), *overrides, "--explain"])
    assert done.exit_code == 0, done.output
    assert "qkv" in done.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.yaml"]
    refused = CliRunner().invoke(app, ["train", str(path), "layout.cols=3", "--explain"])
    assert refused.exit_code != 0
    assert "does not divide" in str(refused.exception)
