"""Any run at all: every refusal says what would work, and that works."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gridformer.config import LayoutConfig, ModelConfig, RunConfig, TrainConfig
from tests.offers import changed, offers, problems, run_of, subject, subjects


@st.composite
def runs(draw: st.DrawFn) -> RunConfig:
    """Small and awkward numbers, most of which do not fit."""
    heads, width = draw(st.integers(1, 16)), draw(st.integers(1, 8))
    model = ModelConfig(
        family=draw(st.sampled_from(["gpt2", "gpt2", "bert", "t5", "transformer"])),
        head_dim=draw(st.sampled_from([0, 0, 0, 1, 3, 4])),
        n_layers=draw(st.integers(1, 5)),
        hidden_size=heads * width,
        n_heads=heads,
        ffn_size=draw(st.integers(0, 99)),
        max_seq_len=draw(st.integers(1, 40)),
    )
    plan = LayoutConfig(
        scheme=draw(st.sampled_from(["single", "megatron", "optimus", "subgraph"])),
        rows=draw(st.integers(1, 6)),
        cols=draw(st.integers(1, 9)),
        branches=draw(st.sampled_from([1, 1, 1, 2, 3, 4, 8])),
        common=draw(st.sampled_from(["all", "all", "first"])),
        attention=draw(st.sampled_from(["inside", "inside", "outside"])),
        feed_forward=draw(st.sampled_from(["branched", "branched", "common"])),
        order=draw(st.sampled_from(["topology", "topology", "contiguous"])),
        dp=draw(st.integers(1, 5)),
        dp_mode=draw(st.sampled_from(["replicate", "replicate", "zero1", "fsdp"])),
        pp=draw(st.sampled_from([1, 1, 1, 2, 3, 4])),
        stages_per_rank=draw(st.sampled_from([1, 1, 1, 2, 3])),
        pipeline=draw(st.sampled_from(["auto", "auto", "gpipe", "1f1b", "interleaved"])),
        sequence_parallel=draw(st.booleans()),
        schedule=draw(st.sampled_from(["auto", "auto", "broadcast", "pipelined", "gather"])),
        stationary=draw(st.sampled_from(["auto", "auto", "output", "input"])),
        keep_gathered=draw(st.sampled_from(["auto", "auto", "none", "inputs", "weights", "all"])),
        devices_per_node=draw(st.sampled_from([0, 0, 1, 2, 3, 4, 8])),
        micro_batches=draw(st.integers(1, 7)),
    )
    train = TrainConfig(global_batch=plan.micro_batches * draw(st.integers(1, 12)))
    data: dict[str, Any] = {"path": "x", "seq_len": draw(st.integers(0, 48))}
    if model.two_stacks:
        data["source_len"] = draw(st.integers(0, 48))
    return RunConfig.model_validate({"model": model, "data": data, "layout": plan, "train": train})


@settings(max_examples=200)
@given(run=runs())
def test_every_offer_solves_its_problem(run: RunConfig) -> None:
    """Each value of the layout, batch or data that a sentence offers makes that sentence go."""
    for problem in problems(run):
        for offer in offers(problem):
            if any(key.startswith("model.") for key in offer):
                continue
            assert subject(problem) not in subjects(changed(run, offer)), offer


@settings(max_examples=200)
@given(run=runs())
def test_following_the_offers_leads_to_a_run_that_fits(run: RunConfig) -> None:
    """The first of them each time."""
    for _ in range(20):
        found = problems(run)
        if not found:
            return
        run = changed(run, offers(found[0])[0])
    raise AssertionError("the offers lead in circles")


@settings(max_examples=200)
@given(run=runs())
@example(run=run_of(**{"layout.scheme": "megatron", "layout.cols": 8}))
@example(run=run_of(**{"layout.scheme": "optimus", "layout.branches": 5}))
def test_every_model_that_is_offered_is_one(run: RunConfig) -> None:
    """`model.n_heads=16` must divide hidden_size, or the offer cannot be taken."""
    for problem in problems(run):
        for offer in offers(problem):
            if any(key.startswith("model.") for key in offer):
                assert subject(problem) not in subjects(changed(run, offer)), offer


def narrow_heads(n_heads: int, rows: int, cols: int) -> RunConfig:
    """Heads of one element each, which together are as wide as the rest of the model."""
    model = {"model.hidden_size": n_heads, "model.n_heads": n_heads, "model.head_dim": 1}
    layout = {"layout.scheme": "optimus", "layout.rows": rows, "layout.cols": cols}
    return run_of(**model, **layout)


@settings(max_examples=200)
@given(run=runs())
@example(run=run_of(**{"layout.scheme": "megatron", "layout.cols": 5, "model.ffn_size": 50}))
@example(run=run_of(**{"layout.branches": 5, "layout.common": "first"}))
@example(run=narrow_heads(n_heads=1, rows=2, cols=1))
@example(run=narrow_heads(n_heads=4, rows=4, cols=3))
def test_an_offer_makes_no_new_problem(run: RunConfig) -> None:
    """cols=3 fits the heads, but is no remedy where the feed-forward does not divide by 3."""
    for problem in problems(run):
        for offer in offers(problem):
            if not any("scheme" in key for key in offer):
                after = subjects(changed(run, offer))
                assert after <= subjects(run) - {subject(problem)}, offer


@settings(max_examples=200)
@given(run=runs())
def test_what_passes_really_divides(run: RunConfig) -> None:
    """The rules restated: every cut of every tensor is even."""
    if problems(run):
        return
    plan, model = run.layout, run.model
    grid_rows = plan.rows if plan.scheme == "optimus" else 1
    over_branches = plan.branches if plan.common == "all" else 1
    parts = plan.dp * grid_rows * over_branches * plan.micro_batches
    assert run.train.global_batch % parts == 0
    assert model.n_heads % plan.branches == 0
    assert plan.feed_forward == "common" or model.ffn_size % plan.branches == 0
    assert plan.scheme == "subgraph" or plan.branches == 1
    assert plan.scheme != "subgraph" or plan.cols == 1
    assert model.n_heads % plan.cols == 0
    pooled = model.family == "bert" or model.n_labels  # whose pooler is cut over columns
    if plan.scheme == "optimus" or pooled:
        assert model.hidden_size % plan.cols == 0
    assert model.ffn_size % plan.cols == 0
    assert model.hidden_size % grid_rows == 0
    assert model.n_heads * model.head_width % grid_rows == 0
    assert model.ffn_size % grid_rows == 0
    assert plan.rows == grid_rows
    assert run.seq_len <= model.max_seq_len or model.two_stacks
    assert plan.n_stages <= model.n_links
    assert plan.pp > 1 or (plan.stages_per_rank, plan.pipeline) == (1, "auto")
    assert plan.pp == 1 or (plan.pipeline_order == "interleaved") == (plan.stages_per_rank > 1)
    assert plan.pp == 1 or plan.pipeline_order != "1f1b" or plan.micro_batches >= plan.pp
    if plan.sequence_parallel:
        assert plan.scheme == "megatron"
        assert run.seq_len % plan.cols == 0
        assert run.source_len % plan.cols == 0
