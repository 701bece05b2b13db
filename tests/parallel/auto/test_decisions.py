"""What `auto` decides for a run, and what `gridformer train --explain` says about it."""

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
from gridformer.parallel.validation import check_layout


def run_of(layout: dict[str, Any], **train: Any) -> RunConfig:
    sections = {
        "model": {"n_layers": 4, "hidden_size": 512, "n_heads": 8, "vocab_size": 2048},
        "data": {"path": "somewhere", "seq_len": 128},
        "layout": layout,
        "train": {"global_batch": 16, **train},
    }
    return RunConfig.model_validate(sections)


def branched(layout: dict[str, Any]) -> RunConfig:
    run = run_of({"scheme": "subgraph", **layout})
    check_layout(run)
    return run


def said(run: RunConfig, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    print_decisions(run, decide_run(run), console)
    return console.export_text()


GRID = {"scheme": "optimus", "rows": 2, "cols": 2}


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_traffic_of_sharded_replicas(micro_batches: int) -> None:
    """Layers are gathered twice per micro-batch, the table once; both gradients are summed once."""
    grid = {**GRID, "dp": 2, "micro_batches": micro_batches, "keep_gathered": "none"}
    whole, zero1, fsdp = (
        decide_run(run_of({**grid, "dp_mode": mode})) for mode in ("replicate", "zero1", "fsdp")
    )
    h, v, n = 512, 2048, 4
    # 2 (dp - 1) / dp of what one device owns, all-reduced
    assert whole.traffic["dp"] == (12 * h * h * n + v * h) / 4 * 4
    assert zero1.traffic == whole.traffic
    half = decide_run(run_of(grid, dtype="bfloat16")).traffic
    assert half["col"] == whole.traffic["col"] / 2
    times = 2 * micro_batches + 1
    assert fsdp.traffic["dp"] == (times * 12 * h * h * n + 2 * v * h) / 2 / 4 * 4
    states = [found.choices.work.state_bytes for found in (whole, zero1, fsdp)]
    assert states == ([16, 10, 8] if micro_batches == 1 else [16, 12, 10])
    assert "gradients and parameters" in said(run_of({**grid, "dp_mode": "fsdp"}))


def test_explanation_names_every_product_and_reason() -> None:
    text = said(run_of({**GRID, "devices_per_node": 2}))
    for product in ("qkv x4", "out x4", "up x4", "down x4", "head"):
        assert re.search(rf"^{product} ", text, re.MULTILINE), text
    for word in ("stationary:", "schedule:", "keep_gathered:", "a node holds", "MiB"):
        assert word in text
    decided = decide_run(run_of({**GRID, "devices_per_node": 2}))
    assert decided.block is not None
    assert decided.block.describe((1, 1, 2, 2)) in text


@pytest.mark.parametrize("layout", [GRID, {"scheme": "subgraph", "branches": 4}])
def test_numbers_in_the_explanation_are_the_choices(layout: dict[str, Any]) -> None:
    run = run_of({**layout, "keep_gathered": "none"})
    choices, text = decide_run(run).choices, said(run, 200)
    for name in ("qkv", "out", "up", "down"):
        row = next(line for line in text.splitlines() if line.startswith(name)).split()
        passes = choices.forward(choices[name]), choices.backward(choices[name])
        received = [(t.col + t.row) * 4 / 2**20 for t in passes]
        assert min(received) > 0
        cells = [str(t.messages) for t in passes]
        assert row[-4:] == [*cells, *(f"{number:.3g}" for number in received)]
    if "branches" in layout:
        assert "subgraph, 4 branches: 2,048 tokens per micro-batch" in text
        assert re.search(r"^head +512 x 2048 +- +common +-", text, re.MULTILINE)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("layout", [GRID, {"scheme": "subgraph", "branches": 2}])
def test_every_column_has_a_name_and_fits(layout: dict[str, Any], width: int) -> None:
    run = run_of({**layout, "keep_gathered": "inputs"}, recompute="full")
    lines = said(run, width).splitlines()
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
    for layout, whole in (({}, "the whole model"), ({"pp": 2, "micro_batches": 2}, "a whole pipe")):
        text = " ".join(said(run_of({"dp": 2, "dp_mode": "fsdp", **layout})).split())
        assert f"One device computes {whole}" in text
        assert "but gathers each layer's parameters before it" in text
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


# n = 8 processes in g sub-grids, k per node; messages of one split by docs/concepts/subgraph.md.
MESSAGES = [
    ("contiguous", 2, 2, 8, 8),
    ("contiguous", 2, 4, 8, 8),
    ("contiguous", 4, 2, 8, 24),
    ("contiguous", 4, 4, 16, 16),
    ("topology", 2, 2, 16, 0),
    ("topology", 2, 4, 16, 0),
    ("topology", 4, 2, 16, 16),
    ("topology", 4, 4, 32, 0),
]


@pytest.mark.parametrize(("order", "g", "k", "within", "between"), MESSAGES)
def test_messages_within_nodes_and_between_them_are_named(
    order: str, g: int, k: int, within: int, between: int
) -> None:
    layout = {"branches": g, "dp": 8 // g, "order": order, "devices_per_node": k}
    assert within + between == 8 * g
    assert (
        f"- order: {order}; of the messages of one split {within} stay within nodes of {k} "
        f"and {between} go between them" in said(branched(layout), 200)
    )


def test_unknown_nodes_are_not_mentioned() -> None:
    """No grid block is placed on known nodes either, since there is no grid."""
    assert "order:" not in said(branched({"branches": 4}), 200)
    run = branched({"branches": 4, "devices_per_node": 2})
    assert decide_run(run).candidates == []
    assert decide_run(run).block is None
    assert "a node holds" not in said(run, 200)


@pytest.mark.parametrize(
    ("layout", "words", "inside"),
    [
        ({}, "qkv, out, up, down", 12),
        ({"attention": "outside"}, "up, down", 8),
        ({"feed_forward": "common"}, "qkv, out", 4),
        ({"attention": "outside", "feed_forward": "common"}, "no product", 0),
    ],
)
def test_branched_modules_are_named_with_their_share(
    layout: dict[str, Any], words: str, inside: int
) -> None:
    """These are shares of 12 h² per layer and v h of the embedding."""
    run = branched({"branches": 2, "dp": 2, **layout})
    h, n, v = 512, 4, 2048
    share = inside * h * h * n / (12 * h * h * n + v * h)
    assert (
        f"- branches: {words} in 2 branches, {share:.0%} of the parameters, whose gradients are "
        "summed over dp=2 processes" in said(run, 200)
    )


def test_traffic_equals_the_formulas() -> None:
    """Gradients of branches are summed over n/g processes, those of common layers over n."""
    h, v, n, g, dp = 512, 2048, 4, 4, 2
    layout = {"branches": g, "dp": dp, "keep_gathered": "inputs"}
    traffic = decide_run(branched(layout)).traffic
    branches, common = 12 * h * h * n, v * h
    gradients = (dp - 1) / dp * branches / g + (g * dp - 1) / (g * dp) * common
    assert traffic["dp"] == pytest.approx(2 * gradients * 4)
    first = decide_run(branched({**layout, "common": "first"})).traffic
    gradients = (dp - 1) / dp * (branches / g + common)
    assert first["dp"] == pytest.approx(2 * gradients * 4)


@pytest.mark.parametrize("common", ["all", "first"])
def test_projections_outside_the_branches_send_slices_and_results(common: str) -> None:
    """Slices take 3 h and results h elements per token, in forward and in backward.

    Each process sends what it does not keep itself.
    """
    g, h, n = 4, 512, 4
    layout = {"branches": g, "attention": "outside", "feed_forward": "common", "common": common}
    run = branched(layout)
    tokens = 16 * 128 / (g if common == "all" else 1)
    want = 2 * 4 * h * tokens * (g - 1) / g * n * 4
    assert decide_run(run).traffic["col"] == pytest.approx(want)
    text = said(run, 200)
    assert f"activations over branches {want / 2**20:,.1f} MiB" in text
    assert "3 h per token" in text
    assert re.search(r"^qkv x4 +512 x 1536 +- +common +-", text, re.MULTILINE)


@pytest.mark.parametrize(("keep", "kept"), [("inputs", True), ("none", False), ("auto", True)])
def test_inputs_of_branches_are_kept_by_default(keep: str, kept: bool) -> None:
    """As in the paper, branches keep their inputs."""
    run = branched({"branches": 2, "dp": 2, "keep_gathered": keep})
    choices = decide_run(run).choices
    assert [choices[name].keep_input for name in ("qkv", "up")] == [kept, kept]
    assert not choices["head"].keep_input
    assert ("keep_gathered: inputs are kept" in said(run, 200)) == (keep == "auto")
