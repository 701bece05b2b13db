"""What a layout asks of a model and a batch: every refusal says what would work, and that works."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gridformer.config import LayoutConfig, ModelConfig, RunConfig, TrainConfig
from gridformer.errors import ConfigError
from gridformer.layout import build_axes, check

Offer = dict[str, str]  # keys to set together, with their values


def run_of(**changes: Any) -> RunConfig:
    """`run_of(**{"layout.cols": 2})`: a run that fits one device, changed."""
    raw: dict[str, dict[str, Any]] = {
        "model": {"n_layers": 1, "hidden_size": 48, "n_heads": 12, "max_seq_len": 24},
        "data": {"path": "somewhere"},
        "layout": {},
        "train": {"global_batch": 24},
    }
    for key, value in changes.items():
        section, name = key.split(".")
        raw[section][name] = value
    return RunConfig.model_validate(raw)


def changed(run: RunConfig, offer: Offer) -> RunConfig:
    """The run with an offer taken. Raises if that is no valid run."""
    raw = run.model_dump()
    for key, value in offer.items():
        section, name = key.split(".")
        assert name in raw[section], key
        raw[section][name] = value
    return RunConfig.model_validate(raw)


def problems(run: RunConfig) -> list[str]:
    try:
        check(run)
    except ConfigError as error:
        return error.problems
    return []


def offers(problem: str) -> list[Offer]:
    """Every alternative of a sentence that ends in `use a=1 and b=2, or c=3, 4 or 5`."""
    remedy = re.split(r"[:;] use ", problem)[1]
    remedy = re.sub(r" \(.*?\)", "", remedy)
    found: list[Offer] = []
    for alternative in re.split(r",? or (?=[a-z_.]+=)", remedy):
        pairs = [part.split("=") for part in alternative.split(" and ")]
        assert all(len(pair) == 2 for pair in pairs), alternative
        keys = [key if "." in key else f"layout.{key}" for key, _ in pairs]
        if len(pairs) == 1:
            values = [v for v in re.split(r", | or ", pairs[0][1]) if v != "..."]
            found += [{keys[0]: value} for value in values]
        else:
            found.append(dict(zip(keys, (value for _, value in pairs))))
    assert found, problem
    return found


def subject(problem: str) -> str:
    """What a sentence complains of, without its numbers: `model.n_heads ... layout.cols`."""
    if problem.startswith("train.global_batch"):
        return "train.global_batch"
    if problem.startswith("layout.devices_per_node"):  # whatever it names of the layout
        return "layout.devices_per_node"
    return re.sub(r"=[^ :;]*", "", re.split(r"[:;] use ", problem)[0])


def subjects(run: RunConfig) -> set[str]:
    return {subject(problem) for problem in problems(run)}


def test_offers_are_read_right() -> None:
    text = "model.n_heads=12 does not divide over layout.cols=8: use layout.cols=1, 2 or 12, or "
    assert offers(text + "model.n_heads=8 or 16") == [
        {"layout.cols": "1"},
        {"layout.cols": "2"},
        {"layout.cols": "12"},
        {"model.n_heads": "8"},
        {"model.n_heads": "16"},
    ]
    text = "x; use rows=1 and cols=1 (dp adds replicas), or scheme=megatron"
    assert offers(text) == [
        {"layout.rows": "1", "layout.cols": "1"},
        {"layout.scheme": "megatron"},
    ]
    text = "x: use data.seq_len=4, or model.max_seq_len=9"
    assert offers(text) == [{"data.seq_len": "4"}, {"model.max_seq_len": "9"}]


# --------------------------------------------------------------------------- each rule

WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"layout.scheme": "megatron", "layout.cols": 8},
        "model.n_heads=12 does not divide over layout.cols=8: use layout.cols=1",
    ),
    (
        {"layout.scheme": "megatron", "layout.cols": 12, "model.ffn_size": 50},
        "model.ffn_size=50 does not divide over layout.cols=12: use layout.cols=1",
    ),
    (
        {"layout.scheme": "optimus", "layout.rows": 5, "train.global_batch": 25}
        | {"model.ffn_size": 200},
        "model.hidden_size=48 does not divide over layout.rows=5: use layout.rows=1",
    ),
    (
        {"layout.scheme": "optimus", "layout.rows": 4, "model.ffn_size": 50},
        "model.ffn_size=50 does not divide over layout.rows=4: use layout.rows=1",
    ),
    (
        {"layout.scheme": "megatron", "layout.cols": 4, "layout.sequence_parallel": True}
        | {"data.seq_len": 22},
        "data.seq_len=22 does not divide over layout.cols=4: use layout.cols=1",
    ),
    (
        {"layout.scheme": "optimus", "layout.rows": 2, "layout.dp": 2, "train.global_batch": 10},
        "train.global_batch=10 does not divide over layout.dp (2) x layout.rows (2): use "
        "train.global_batch=8 or 12",
    ),
    (
        {"layout.dp": 3, "layout.micro_batches": 5, "train.global_batch": 10},
        "train.global_batch=10 does not divide over layout.dp (3) x layout.micro_batches (5): use "
        "train.global_batch=15",
    ),
    (
        {"data.seq_len": 25},
        "data.seq_len=25 is longer than model.max_seq_len=24: use data.seq_len=24, or "
        "model.max_seq_len=25",
    ),
    (
        {"layout.pp": 4},
        "layout.pp=4 x layout.stages_per_rank=1: more stages than the model has layers, embeddings "
        "and heads to cut between (3): use layout.pp=3",
    ),
    (
        {"layout.pp": 2, "layout.stages_per_rank": 2},
        "layout.pp=2 x layout.stages_per_rank=2: more stages than the model has layers, embeddings "
        "and heads to cut between (3): use layout.pp=1 and stages_per_rank=1 and pipeline=auto, or "
        "layout.stages_per_rank=1",
    ),
    (
        {"layout.stages_per_rank": 2},
        "layout.stages_per_rank=2 belongs to pipelines, and layout.pp=1 has none: use "
        "layout.stages_per_rank=1",
    ),
    (
        {"layout.pipeline": "1f1b"},
        "layout.pipeline=1f1b belongs to pipelines, and layout.pp=1 has none: use "
        "layout.pipeline=auto",
    ),
    (
        {"layout.pp": 3, "layout.pipeline": "1f1b", "layout.micro_batches": 2},
        "layout.pipeline=1f1b fills layout.pp=3 stages with as many micro-batches, and "
        "layout.micro_batches=2 are fewer: use layout.pipeline=auto, or layout.micro_batches=3",
    ),
    (
        {"layout.pp": 2, "layout.pipeline": "interleaved"},
        "layout.pipeline=interleaved takes turns with several stages a rank, not "
        "layout.stages_per_rank=1: use layout.pipeline=auto",
    ),
    (
        {"layout.pp": 2, "layout.stages_per_rank": 2, "layout.pipeline": "gpipe"}
        | {"model.n_layers": 3, "layout.micro_batches": 4},
        "layout.pipeline=gpipe has one stage a rank, not layout.stages_per_rank=2: use "
        "layout.pipeline=auto, or layout.stages_per_rank=1",
    ),
    (
        {"layout.pp": 2, "layout.stages_per_rank": 2, "layout.micro_batches": 5}
        | {"model.n_layers": 3, "train.global_batch": 60},
        "layout.micro_batches=5 does not make equal rounds of at least layout.pp=2 for interleaved "
        "stages: use layout.micro_batches=4, or layout.stages_per_rank=1",
    ),
    (
        {"layout.cols": 2},
        "layout.scheme=single is a 1x1 grid, not 1x2: use rows=1 and cols=1 (dp adds replicas), or "
        "scheme=megatron or scheme=optimus",
    ),
    (
        {"layout.scheme": "megatron", "layout.rows": 2, "layout.cols": 3},
        "layout.rows=2: megatron cuts one way; use rows=1 and cols=6, or scheme=optimus",
    ),
    (
        {"layout.scheme": "optimus", "layout.sequence_parallel": True},
        "layout.sequence_parallel belongs to scheme=megatron, not optimus: use "
        "sequence_parallel=false",
    ),
    (
        {"layout.scheme": "subgraph", "layout.branches": 8},
        "model.n_heads=12 does not divide over layout.branches=8: use layout.branches=1, 2, 3, 4, "
        "6 or 12, or model.n_heads=8 or 16",
    ),
    (
        {"layout.scheme": "subgraph", "layout.branches": 12, "model.ffn_size": 50},
        "model.ffn_size=50 does not divide over layout.branches=12: use layout.branches=1 or 2, or "
        "model.ffn_size=48 or 60",
    ),
    (
        {"layout.scheme": "subgraph", "layout.branches": 4, "train.global_batch": 10},
        "train.global_batch=10 does not divide over layout.branches (4): use "
        "train.global_batch=8 or 12",
    ),
    (
        {"layout.scheme": "subgraph", "layout.branches": 3, "layout.dp": 2}
        | {"layout.micro_batches": 2, "train.global_batch": 16},
        "train.global_batch=16 does not divide over layout.dp (2) x layout.branches (3) x "
        "layout.micro_batches (2): use train.global_batch=12 or 24",
    ),
    (
        {"layout.scheme": "subgraph", "layout.branches": 2, "layout.rows": 2, "layout.cols": 3},
        "layout.scheme=subgraph has branches in the place of a grid, not 2x3: use rows=1 and "
        "cols=1, or scheme=optimus",
    ),
    (
        {"layout.branches": 2},
        "layout.branches=2 belongs to scheme=subgraph, not single: use layout.branches=1",
    ),
    (
        {"layout.scheme": "megatron", "layout.common": "first"},
        "layout.common=first belongs to scheme=subgraph, not megatron: use layout.common=all",
    ),
    (
        {"layout.scheme": "optimus", "layout.attention": "outside"},
        "layout.attention=outside belongs to scheme=subgraph, not optimus: use "
        "layout.attention=inside",
    ),
    (
        {"layout.scheme": "megatron", "layout.feed_forward": "common"},
        "layout.feed_forward=common belongs to scheme=subgraph, not megatron: use "
        "layout.feed_forward=branched",
    ),
    (
        {"layout.order": "contiguous"},
        "layout.order=contiguous belongs to scheme=subgraph, not single: use layout.order=topology",
    ),
    (
        {"layout.scheme": "subgraph", "layout.branches": 2, "layout.keep_gathered": "weights"},
        "layout.keep_gathered=weights: subgraph gathers no such thing: use "
        "layout.keep_gathered=auto, inputs or none",
    ),
    (
        {"layout.scheme": "subgraph", "layout.branches": 2, "layout.schedule": "gather"},
        "layout.schedule=gather belongs to scheme=optimus, not subgraph: use layout.schedule=auto",
    ),
    (
        {"layout.dp_mode": "fsdp"},
        "layout.dp_mode=fsdp shares out what replicas hold, and layout.dp=1 is one replica: use "
        "layout.dp_mode=replicate",
    ),
    (
        {"layout.scheme": "subgraph", "layout.branches": 2, "layout.common": "first"}
        | {"layout.dp_mode": "zero1"},
        "layout.dp_mode=zero1 shares out what replicas hold, and layout.dp=1 is one replica: use "
        "layout.dp_mode=replicate",
    ),
    (
        {"layout.scheme": "subgraph", "layout.branches": 2, "layout.dp": 3}
        | {"layout.devices_per_node": 4},
        "layout.devices_per_node=4 does not divide branches x dp x pp=6: use "
        "layout.devices_per_node=",
    ),
]


@pytest.mark.parametrize(("changes", "text"), WRONG, ids=[text[:40] for _, text in WRONG])
def test_one_rule_broken(changes: dict[str, Any], text: str) -> None:
    run = run_of(**changes)
    (only,) = problems(run)
    assert only.startswith(text)
    for offer in offers(only):
        if not any(key.startswith("model.") for key in offer):  # those have a test below
            assert subject(only) not in subjects(changed(run, offer)), offer


def test_all_problems_at_once() -> None:
    """Those of the shape, of the model, of the batch and of the sequence."""
    changes = {
        **{"layout.scheme": "megatron", "layout.rows": 2, "layout.cols": 5, "layout.pp": 9},
        **{"layout.dp": 7, "layout.sequence_parallel": True, "data.seq_len": 99},
    }
    found = problems(run_of(**changes))
    starts: tuple[str, ...] = (
        "layout.pp=9",
        "layout.rows=2",
        "model.n_heads=12",
        "model.ffn_size=192",
    )
    starts += ("data.seq_len=99 does not divide", "train.global_batch=24", "data.seq_len=99 is")
    assert sorted(p for p in found if not p.startswith(starts)) == []
    assert len(found) == len(starts)


@pytest.mark.parametrize(("changes", "text"), WRONG, ids=[text[:40] for _, text in WRONG])
def test_the_first_remedy_of_one_broken_rule_makes_the_run_fit(
    changes: dict[str, Any], text: str
) -> None:
    run = run_of(**changes)
    (only,) = problems(run)
    assert problems(changed(run, offers(only)[0])) == []


def test_a_first_sub_grid_alone_shares_no_samples_over_branches() -> None:
    """What the feed-forward's cut and the samples' ask for is asked of layouts that have them."""
    odd = {"layout.scheme": "subgraph", "layout.branches": 4, "train.global_batch": 7}
    assert subjects(run_of(**odd)) == {"train.global_batch"}
    assert problems(run_of(**odd, **{"layout.common": "first"})) == []
    odd |= {"layout.common": "first", "model.ffn_size": 50}
    assert len(problems(run_of(**odd))) == 1
    assert problems(run_of(**odd, **{"layout.feed_forward": "common"})) == []


@pytest.mark.parametrize("scheme", ["single", "megatron", "optimus", "subgraph"])
def test_what_a_scheme_does_not_cut_need_not_divide(scheme: str) -> None:
    """One replica on one device takes anything; rows matter to Optimus alone."""
    odd = {"model.hidden_size": 35, "model.n_heads": 5, "model.ffn_size": 11}
    odd |= {"data.seq_len": 23, "train.global_batch": 7}
    assert problems(run_of(**odd, **{"layout.scheme": scheme})) == []
    assert problems(run_of(**odd, **{"layout.scheme": scheme, "layout.dp": 7})) == []


# --------------------------------------------------------------------------- any run at all


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
@example(run=narrow_heads(n_heads=3, rows=4, cols=2))
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


def test_axes_of_one_process() -> None:
    """Nothing is initialised for it."""
    axes = build_axes(LayoutConfig(), "cpu")
    assert [axes[name].size for name in ("pp", "dp", "row", "col", "world")] == [1] * 5
