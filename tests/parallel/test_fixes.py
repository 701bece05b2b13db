"""For any run, every refusal offers changes, and those changes work."""

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gridformer.config import Family, LayoutConfig, ModelConfig, RunConfig, TrainConfig, schemes
from gridformer.mesh.node_placement import blocks, sizes_of
from gridformer.parallel.validation import problems
from tests.support.fixes import changed, rules, run_of


@st.composite
def runs(draw: st.DrawFn) -> RunConfig:
    """Draw small and awkward numbers, most of which do not fit."""
    heads, width = draw(st.integers(1, 16)), draw(st.integers(1, 8))
    families: list[Family] = ["gpt2", "gpt2", "bert", "t5", "transformer"]
    family = draw(st.sampled_from(families))
    branches: dict[str, Any] = {"n_labels": draw(st.sampled_from([0, 0, 3]))}
    if family == "bert":
        branches["sentence_pair"] = draw(st.booleans())
    model = ModelConfig(
        **(branches if family in ("gpt2", "bert") else {}),
        family=family,
        head_dim=draw(st.sampled_from([0, 0, 0, 1, 3, 4])),
        n_layers=draw(st.integers(1, 5)),
        hidden_size=heads * width,
        n_heads=heads,
        ffn_size=draw(st.integers(0, 99)),
        max_seq_len=draw(st.integers(1, 40)),
    )
    plan = LayoutConfig(
        scheme=draw(st.sampled_from([*schemes()])),
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
        pipeline=draw(
            st.sampled_from(["auto", "auto", "gpipe", "1f1b", "interleaved", "zb_h1", "zbv"])
        ),
        sequence_parallel=draw(st.booleans()),
        schedule=draw(st.sampled_from(["auto", "auto", "broadcast", "pipelined", "gather"])),
        stationary=draw(st.sampled_from(["auto", "auto", "output", "input"])),
        keep_gathered=draw(st.sampled_from(["auto", "auto", "none", "inputs", "weights", "all"])),
        devices_per_node=draw(st.sampled_from([0, 0, 1, 2, 3, 4, 8])),
        micro_batches=draw(st.integers(1, 7)),
    )
    batch = plan.micro_batches * draw(st.integers(1, 12))
    train = TrainConfig(global_batch=batch, compile=draw(st.booleans()))
    data: dict[str, Any] = {"path": "x", "seq_len": draw(st.integers(0, 48))}
    if model.two_stacks:
        data["source_len"] = draw(st.integers(0, 48))
    return RunConfig.model_validate({"model": model, "data": data, "layout": plan, "train": train})


def one_head_on_a_wrong_grid() -> RunConfig:
    """Of the many fixes to keep its devices none works, and only two changes together do."""
    changes = {"layout.rows": 4, "layout.cols": 6, "layout.dp": 3, "layout.devices_per_node": 2}
    model = {"model.n_heads": 1, "model.hidden_size": 1, "model.head_dim": 1, "model.ffn_size": 4}
    model |= {"model.n_layers": 1, "model.max_seq_len": 1, "data.seq_len": 0}
    return run_of(**{"layout.scheme": "subgraph", "train.global_batch": 1, **changes, **model})


def narrow_heads(n_heads: int, rows: int, cols: int) -> RunConfig:
    """Return a run with heads of one element each, together as wide as the rest of the model."""
    model = {"model.hidden_size": n_heads, "model.n_heads": n_heads, "model.head_dim": 1}
    layout = {"layout.scheme": "optimus", "layout.rows": rows, "layout.cols": cols}
    return run_of(**model, **layout)


def mends_and_breaks_nothing(run: RunConfig) -> None:
    """Each offer of every problem, applied alone, satisfies its rule and breaks no other rule."""
    found = problems(run)
    before = {problem.rule for problem in found}
    assert len(before) == len(found)
    for problem in found:
        assert problem.changes, problem
        for offer in problem.changes:
            assert rules(changed(run, offer)) <= before - {problem.rule}, (problem, offer)
            assert all(key in str(problem) for key in offer)


@settings(max_examples=200)
@given(run=runs())
@example(run=run_of(**{"layout.scheme": "megatron", "layout.cols": 8}))
@example(run=run_of(**{"layout.scheme": "megatron", "layout.cols": 5, "model.ffn_size": 50}))
@example(run=run_of(**{"layout.scheme": "optimus", "layout.branches": 5}))
@example(run=run_of(**{"layout.branches": 5, "layout.common": "first"}))
@example(run=narrow_heads(n_heads=1, rows=2, cols=1))
@example(run=narrow_heads(n_heads=4, rows=4, cols=3))
@example(run=one_head_on_a_wrong_grid())
def test_every_offer_solves_its_problem_without_a_new_one(run: RunConfig) -> None:
    mends_and_breaks_nothing(run)


@settings(max_examples=40)
@given(run=runs())
def test_following_the_first_offers_leads_to_a_run_that_fits(run: RunConfig) -> None:
    """Each offer removes a problem, so there are no more steps than problems."""
    for _ in problems(run):
        found = problems(run)
        if found:
            run = changed(run, found[0].changes[0])
    assert problems(run) == []


def test_changes_are_combined_where_one_alone_does_not_suffice() -> None:
    """Only 1 branch divides all sizes, and then dp_mode has nothing to shard."""
    layout = {"layout.scheme": "subgraph", "layout.branches": 5, "layout.dp_mode": "zero1"}
    run = run_of(**layout, **{"train.global_batch": 25})
    by_rule = {problem.rule: problem for problem in problems(run)}
    heads = by_rule["branches cuts model.n_heads"]
    assert heads.changes == ({"layout.branches": 1, "layout.dp_mode": "replicate"},)
    assert str(heads).endswith(": use layout.branches=1 and layout.dp_mode=replicate")


@settings(max_examples=200)
@given(run=runs())
def test_runs_that_pass_really_divide(run: RunConfig) -> None:
    """Restate the rules: every tensor is sharded evenly."""
    if rules(run):
        return
    plan, model = run.layout, run.model
    both_ways = plan.scheme in ("optimus", "megatron_2d")
    grid_rows = plan.rows if both_ways else 1
    over_branches = plan.branches if plan.common == "all" else 1
    parts = plan.dp * grid_rows * over_branches * plan.micro_batches
    assert run.train.global_batch % parts == 0
    assert model.n_heads % plan.branches == 0
    assert plan.feed_forward == "common" or model.ffn_size % plan.branches == 0
    assert plan.scheme == "subgraph" or plan.branches == 1
    assert plan.scheme != "subgraph" or plan.cols == 1
    assert model.n_heads % plan.cols == 0
    pair = model.family == "bert" and model.sentence_pair
    pooled = pair or model.n_labels > 0  # the pooler is sharded over columns
    if plan.scheme == "optimus" or pooled:
        assert model.hidden_size % plan.cols == 0
    assert model.ffn_size % plan.cols == 0
    assert model.hidden_size % grid_rows == 0
    if plan.scheme == "optimus":
        assert model.n_heads * model.head_width % grid_rows == 0
        assert model.ffn_size % grid_rows == 0
    assert plan.rows == grid_rows
    assert run.seq_len <= model.max_seq_len or model.two_stacks
    assert plan.n_stages <= model.n_links
    assert plan.pp > 1 or (plan.stages_per_rank, plan.pipeline) == (1, "auto")
    assert plan.pp == 1 or (plan.pipeline_order == "interleaved") == (plan.stages_per_rank > 1)
    assert plan.pp == 1 or plan.pipeline_order != "1f1b" or plan.micro_batches >= plan.pp
    assert not plan.sequence_parallel or plan.scheme == "megatron"
    assert not plan.devices_per_node or blocks(sizes_of(plan), plan.devices_per_node)
    if plan.sequence_parallel or plan.scheme == "megatron_2d":
        assert run.seq_len % plan.cols == 0
        assert run.source_len % plan.cols == 0
