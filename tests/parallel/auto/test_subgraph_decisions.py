"""What `train --explain` says about a run under sub-graph parallelism."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import decide_run, print_decisions
from gridformer.parallel.validation import check_layout


def run_of(layout: dict[str, Any], **train: Any) -> RunConfig:
    sections = {
        "model": {"n_layers": 4, "hidden_size": 512, "n_heads": 8, "vocab_size": 2048},
        "data": {"path": "somewhere", "seq_len": 128},
        "layout": {"scheme": "subgraph", **layout},
        "train": {"global_batch": 16, **train},
    }
    run = RunConfig.model_validate(sections)
    check_layout(run)
    return run


def said(run: RunConfig) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    print_decisions(run, decide_run(run), console)
    return console.export_text()


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
        f"and {between} go between them" in said(run_of(layout))
    )


def test_unknown_nodes_are_not_mentioned() -> None:
    """No grid block is placed on known nodes either, since there is no grid."""
    assert "order:" not in said(run_of({"branches": 4}))
    run = run_of({"branches": 4, "devices_per_node": 2})
    assert decide_run(run).candidates == []
    assert decide_run(run).block is None
    assert "a node holds" not in said(run)


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
    run = run_of({"branches": 2, "dp": 2, **layout})
    h, n, v = 512, 4, 2048
    share = inside * h * h * n / (12 * h * h * n + v * h)
    assert (
        f"- branches: {words} in 2 branches, {share:.0%} of the parameters, whose gradients are "
        "summed over dp=2 processes" in said(run)
    )


def test_traffic_equals_the_formulas() -> None:
    """Each layer has two splits and two sums of (g-1)/g T h, and backward moves as much again.

    Gradients of branches are summed over n/g processes, those of common layers over n.
    """
    tokens, h, v, n, g, dp = 16 * 128 / 2, 512, 2048, 4, 4, 2
    layout = {"branches": g, "dp": dp, "keep_gathered": "inputs"}
    traffic = decide_run(run_of(layout)).traffic
    assert traffic["col"] == pytest.approx(2 * 4 * n * (g - 1) / g * tokens * h * 4)
    assert traffic["row"] == 0
    branches, common = 12 * h * h * n, v * h
    gradients = (dp - 1) / dp * branches / g + (g * dp - 1) / (g * dp) * common
    assert traffic["dp"] == pytest.approx(2 * gradients * 4)
    first = decide_run(run_of({**layout, "common": "first"})).traffic
    assert first["col"] == pytest.approx(2 * 4 * n * tokens * h * 4)
    gradients = (dp - 1) / dp * (branches / g + common)
    assert first["dp"] == pytest.approx(2 * gradients * 4)


def test_numbers_in_the_explanation_are_the_choices() -> None:
    run = run_of({"branches": 4, "keep_gathered": "none"})
    choices = decide_run(run).choices
    text = said(run)
    assert "subgraph, 4 branches: 2,048 tokens per micro-batch" in text
    for name in ("qkv", "out", "up", "down"):
        row = next(line for line in text.splitlines() if line.startswith(name))
        forward, backward = choices.forward(choices[name]), choices.backward(choices[name])
        received = [(t.col + t.row) * 4 / 2**20 for t in (forward, backward)]
        assert min(received) > 0
        cells = [str(forward.messages), str(backward.messages), *(f"{n:.3g}" for n in received)]
        assert row.split()[-4:] == cells
    assert re.search(r"^head +512 x 2048 +- +common +-", text, re.MULTILINE)


@pytest.mark.parametrize("common", ["all", "first"])
def test_projections_outside_the_branches_send_slices_and_results(common: str) -> None:
    """Slices take 3 h and results h elements per token, in forward and in backward.

    Each process sends what it does not keep itself.
    """
    g, h, n = 4, 512, 4
    layout = {"branches": g, "attention": "outside", "feed_forward": "common", "common": common}
    run = run_of(layout)
    tokens = 16 * 128 / (g if common == "all" else 1)
    want = 2 * 4 * h * tokens * (g - 1) / g * n * 4
    assert decide_run(run).traffic["col"] == pytest.approx(want)
    text = said(run)
    assert f"activations over branches {want / 2**20:,.1f} MiB" in text
    assert "3 h per token" in text
    assert re.search(r"^qkv x4 +512 x 1536 +- +common +-", text, re.MULTILINE)


@pytest.mark.parametrize(("keep", "kept"), [("inputs", True), ("none", False), ("auto", True)])
def test_inputs_of_branches_are_kept_by_default(keep: str, kept: bool) -> None:
    """As in the paper, branches keep their inputs."""
    run = run_of({"branches": 2, "dp": 2, "keep_gathered": keep})
    choices = decide_run(run).choices
    assert [choices[name].keep_input for name in ("qkv", "up")] == [kept, kept]
    assert not choices["head"].keep_input
    assert ("keep_gathered: inputs are kept" in said(run)) == (keep == "auto")
