"""What `auto` decides, and why; tests/multirank/test_volumes.py checks the predicted volumes."""

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.parallel.auto import heuristics as rules
from gridformer.parallel.auto.cost import Choices
from gridformer.parallel.auto.fastest import max_chunks
from gridformer.parallel.auto.heuristics import SMALL_BYTES, decide
from gridformer.parallel.auto.products import Work, products_of
from gridformer.parallel.scheme import SchemeSpec

LAYER = ("qkv", "out", "up", "down")
SMALL = ModelConfig(n_layers=2, hidden_size=64, n_heads=4, vocab_size=500, max_seq_len=32)
GPT3 = ModelConfig(n_layers=96, hidden_size=12288, n_heads=96, vocab_size=50304, max_seq_len=2048)


def optimus(rows: int, cols: int, **how: Any) -> LayoutConfig:
    return LayoutConfig(scheme="optimus", rows=rows, cols=cols, **how)


def stationary(choices: Choices) -> dict[str, str]:
    return {name: choice.stationary for name, choice in choices.products.items()}


def kept_bytes(choices: Choices) -> float:
    return sum(choices.kept_bytes(choice) for choice in choices.products.values())


def moved(choices: Choices) -> float:
    """Return the elements that a device receives in a step for all products."""
    steps = [choices.step(choice) for choice in choices.products.values()]
    return sum(step.col + step.row for step in steps)


# Any model whose dimensions divide over any grid from 1x1 to 6x6, and a layout for it.
MODELS = st.builds(
    ModelConfig,
    n_layers=st.integers(1, 96),
    hidden_size=st.integers(1, 300).map(lambda h: 60 * h),
    n_heads=st.just(60),
    ffn_size=st.integers(1, 1200).map(lambda f: 60 * f),
    vocab_size=st.integers(1, 300_000),
    max_seq_len=st.just(60),
    n_labels=st.integers(0, 3),
)
GRIDS = st.tuples(st.integers(1, 6), st.integers(1, 6))
WORKS = st.builds(
    Work,
    tokens=st.integers(1, 10_000).map(lambda n: 60 * n),
    micro_batches=st.integers(1, 8),
    itemsize=st.sampled_from([2, 4, 8]),
    sequences=st.integers(1, 100),
)
HOW = st.fixed_dictionaries(
    {
        "schedule": st.sampled_from(["auto", "broadcast", "pipelined", "gather"]),
        "stationary": st.sampled_from(["auto", "output", "input"]),
        "keep_gathered": st.sampled_from(["auto", "none", "inputs", "weights", "all"]),
    }
)
SIZES = st.integers(1, 6)
KEEPS = st.sampled_from(["auto", "none", "inputs", "weights", "all"])
ONE_ROW = st.builds(
    LayoutConfig,
    scheme=st.just("megatron"),
    cols=SIZES,
    sequence_parallel=st.booleans(),
    keep_gathered=KEEPS,
)
BOTH_WAYS = st.builds(
    LayoutConfig, scheme=st.just("megatron_2d"), rows=SIZES, cols=SIZES, keep_gathered=KEEPS
)
LAYOUTS = st.builds(lambda grid, how: optimus(*grid, **how), GRIDS, HOW) | ONE_ROW | BOTH_WAYS


# --------------------------------------------------------------------------- traffic


def test_the_narrower_activation_travels_whichever_it_is() -> None:
    model = SMALL.model_copy(update={"ffn_size": 32, "vocab_size": 10})
    want = {"qkv": "output", "out": "input", "up": "input", "down": "output", "head": "input"}
    assert stationary(decide(model, optimus(2, 2))) == want


@given(model=MODELS, layout=ONE_ROW | BOTH_WAYS)
def test_megatron_shards_opening_products_by_columns_and_closing_ones_by_rows(
    model: ModelConfig, layout: LayoutConfig
) -> None:
    """This holds whatever is narrower: the two boundaries of a section are fixed."""
    want = {"qkv": "output", "out": "input", "up": "output", "down": "input", "head": "output"}
    chosen = stationary(decide(model, layout))
    assert {name: chosen[name] for name in want} == want


@given(model=MODELS, grid=GRIDS, work=WORKS, how=HOW)
def test_auto_never_moves_more_than_the_paper(
    model: ModelConfig, grid: tuple[int, int], work: Work, how: dict[str, Any]
) -> None:
    """The paper broadcasts every product's input and weight, and twice that in backward."""
    rows, cols = grid
    chosen = decide(model, optimus(rows, cols, **{**how, "stationary": "auto"}), work)
    for choice in chosen.products.values():
        product = choice.product
        col = (cols - 1) / (rows * cols) * work.rows_of(product) * product.n_in
        row = (rows - 1) / (rows * cols) * product.n_in * product.n_out
        narrower = min(product.n_in, product.n_out) / product.n_in
        forward, backward = chosen.forward(choice), chosen.backward(choice)
        assert forward.col == pytest.approx(narrower * col)
        assert forward.row == pytest.approx(row)
        assert backward.col <= 2 * narrower * col * (1 + 1e-9)
        assert backward.row <= 2 * row * (1 + 1e-9)


@given(model=MODELS, layout=LAYOUTS, work=WORKS)
def test_step_traffic_is_the_sum_of_its_micro_batches(
    model: ModelConfig, layout: LayoutConfig, work: Work
) -> None:
    """Kept weights travel only in the first micro-batch; an axis of one device carries nothing."""
    chosen = decide(model, layout, work)
    for choice in chosen.products.values():
        first, later = chosen.forward(choice), chosen.forward(choice, first=False)
        back, step = chosen.backward(choice), chosen.step(choice)
        for traffic in (first, later, back, step):
            assert min(traffic.col, traffic.row) >= 0
            assert (traffic.messages > 0) == (traffic.col + traffic.row > 0)
            assert layout.cols > 1 or traffic.col == 0
            assert layout.rows > 1 or traffic.row == 0
        assert later.col == first.col
        assert later.row == (0 if choice.keep_weight else first.row)
        m, count = work.micro_batches, choice.product.count
        rows = m * back.row + first.row * (1 if choice.keep_weight else m)
        assert step.row == pytest.approx(count * rows)
        assert step.col == pytest.approx(count * m * (first.col + back.col))


# --------------------------------------------------------------------------- schedules


def test_huge_operands_travel_panel_by_panel() -> None:
    """With many rows a gathered weight is many times what a device holds itself."""
    model = GPT3.model_copy(update={"n_layers": 1, "vocab_size": 1_000_000})
    chosen = decide(model, optimus(64, 2), Work(tokens=64 * 2048, itemsize=2))
    large = {name for name, c in chosen.products.items() if c.schedule == "pipelined"}
    assert large >= {"head"}
    assert large < set(chosen.products), "not all of them"
    assert "panel by panel: " + ", ".join(n for n in chosen.products if n in large) in _reason(
        chosen, "schedule"
    )


@given(model=MODELS, layout=LAYOUTS, work=WORKS)
def test_large_operands_are_gathered_in_chunks_and_gathered_ones_are_kept(
    model: ModelConfig, layout: LayoutConfig, work: Work
) -> None:
    chosen = decide(model, layout, work)
    for choice in chosen.products.values():
        kept = choice.keep_input or choice.keep_weight
        assert kept == (chosen.kept_bytes(choice) > 0)
        assert not kept or choice.schedule == "gather"
        assert not choice.keep_input or (choice.stationary == "output" and layout.cols > 1)
        assert not choice.keep_weight or layout.rows > 1
        assert 1 <= choice.n_chunks <= rules.MOST_CHUNKS
        if choice.n_chunks > 1:
            assert choice.schedule == "gather"
            assert not choice.keep_input
            whole = chosen.activation_bytes(choice)
            assert whole > SMALL_BYTES
            terms = choice.product.n_in * choice.product.n_out / chosen.cols
            assert chosen.rows == 1 or whole > 4 * terms
            part = whole / choice.n_chunks
            limit = max(rules.CHUNK_BYTES, chosen.held_bytes * rules.CHUNK_SHARE)
            most = min(rules.MOST_CHUNKS, max_chunks(chosen, layout, choice.product))
            assert part <= limit or choice.n_chunks == most
            assert whole / (choice.n_chunks - 1) > limit, "no more parts than it takes"


def test_the_papers_largest_run_is_gathered_in_chunks() -> None:
    model = GPT3.model_copy(update={"n_layers": 24, "hidden_size": 8192, "n_heads": 64})
    work = Work(tokens=256 * 512, sequences=256, recompute="full")
    chosen = decide(model, optimus(8, 8, keep_gathered="none"), work)
    assert all(chosen[name].n_chunks > 4 for name in LAYER)
    assert "no more is held at a time" in _reason(chosen, "chunks")
    short = decide(model, optimus(8, 8, keep_gathered="none"), replace(work, tokens=16 * 512))
    assert all(choice.n_chunks == 1 for choice in short.products.values()), "32 MiB at most"
    some = decide(model, optimus(8, 8, keep_gathered="none"), replace(work, tokens=48 * 512))
    assert some["out"].n_chunks > 1
    assert some["up"].n_chunks == 1, "terms of its weight's gradient take more than 96 MiB"


# --------------------------------------------------------------------------- kept operands


@given(model=MODELS, layout=LAYOUTS, work=WORKS, shares=st.tuples(*[st.floats(0, 4)] * 2))
def test_more_room_never_moves_more(
    model: ModelConfig, layout: LayoutConfig, work: Work, shares: tuple[float, float]
) -> None:
    layout = layout.model_copy(update={"keep_gathered": "auto"})
    traffic = []
    for share in (0.0, *sorted(shares), 1e9):
        with patch.object(SchemeSpec, "keep_share", share):
            chosen = decide(model, layout, work)
        assert kept_bytes(chosen) <= chosen.held_bytes * share
        traffic.append(moved(chosen))
    assert traffic == sorted(traffic, reverse=True)
    everything = decide(model, layout.model_copy(update={"keep_gathered": "all"}), work)
    nothing = decide(model, layout.model_copy(update={"keep_gathered": "none"}), work)
    assert traffic[0] == moved(nothing)
    assert traffic[-1] == moved(everything)


def test_weights_are_kept_for_many_micro_batches() -> None:
    """A micro-batch has few activations, but weights travel again for each micro-batch."""
    one, many = (
        decide(SMALL, optimus(4, 1, keep_gathered="weights"), Work(128, micro_batches=m))
        for m in (1, 8)
    )
    none = decide(SMALL, optimus(4, 1, keep_gathered="none"), Work(128, micro_batches=8))
    layer = sum(p.n_in * p.n_out * p.count for p in products_of(SMALL))
    assert moved(one) == pytest.approx(3 / 4 * layer * 2)  # forward, and the sum of the gradient
    assert moved(many) == pytest.approx(3 / 4 * layer * (1 + 8))
    assert moved(none) == pytest.approx(3 / 4 * layer * 8 * 3)


# --------------------------------------------------------------------------- settings and reasons


@given(model=MODELS, grid=GRIDS, work=WORKS, how=HOW)
def test_requests_are_used_and_decisions_have_reasons(
    model: ModelConfig, grid: tuple[int, int], work: Work, how: dict[str, Any]
) -> None:
    rows, cols = grid
    chosen = decide(model, optimus(rows, cols, **how), work)
    assert list(chosen.products) == [product.name for product in products_of(model)]
    for choice in chosen.products.values():
        if how["stationary"] != "auto":
            assert choice.stationary == how["stationary"]
        if how["schedule"] != "auto":
            assert choice.schedule == how["schedule"]
        gathered = choice.schedule == "gather"
        if how["keep_gathered"] != "auto":
            inputs = how["keep_gathered"] in ("inputs", "all")
            weights = how["keep_gathered"] in ("weights", "all")
            travels = gathered and choice.stationary == "output" and cols > 1
            assert choice.keep_input == (inputs and travels)
            assert choice.keep_weight == (weights and gathered and rows > 1)
    starts = [reason.split(":")[0] for reason in chosen.reasons]
    for name in ("stationary", "schedule"):
        assert starts.count(name) == (how[name] == "auto")
    kept = [reason for reason in chosen.reasons if reason.startswith("keep_gathered")]
    if how["keep_gathered"] != "auto":
        assert not kept
        return
    could = decide(model, optimus(*grid, **{**how, "keep_gathered": "all"}), work)
    flags = {
        "inputs": [c.keep_input for c in could.products.values()],
        "weights": [c.keep_weight for c in could.products.values()],
    }
    assert len(kept) == sum(map(any, flags.values())), "one for each kind that could be kept"
    for what in flags:
        said = [reason for reason in kept if f": {what} are" in reason]
        taken = [
            c.keep_input if what == "inputs" else c.keep_weight for c in chosen.products.values()
        ]
        assert any(taken) == any(f"{what} are kept" in reason for reason in said)


def test_products_of_a_model() -> None:
    """The elements are those of the model's matrices, each under its module's name."""
    model = ModelConfig(n_layers=3, hidden_size=8, n_heads=2, vocab_size=11, n_labels=2)
    sizes = {p.name: (p.n_in, p.n_out, p.count) for p in products_of(model)}
    assert sizes == {
        "qkv": (8, 24, 3),
        "out": (8, 8, 3),
        "up": (8, 32, 3),
        "down": (32, 8, 3),
        "head": (8, 11, 1),
        "pooler": (8, 8, 1),
    }
    total = sum(map(math.prod, sizes.values()))
    assert decide(model, optimus(1, 2)).parameters == total


def _reason(chosen: Choices, about: str) -> str:
    (reason,) = (r for r in chosen.reasons if r.startswith(f"{about}:"))
    return reason
