"""Configs: overrides, and the words and numbers of messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridformer.config import (
    LayoutConfig,
    ModelConfig,
    any_of,
    closest,
    divisors,
    parse_run,
    shipped_model,
)
from gridformer.config.synonyms import with_new_names
from gridformer.parallel.registry import describe_layout

BASE: dict[str, Any] = {"model": "demo-4m", "data": {"path": "somewhere"}}


def test_configs_are_frozen() -> None:
    run = parse_run(BASE)
    with pytest.raises(ValueError, match="frozen"):
        run.train.steps = 5


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.steps=7", "train", "steps", 7),
        ("train.lr=1e-3", "train", "lr", 1e-3),  # YAML itself reads this as a string
        ("train.lr=1", "train", "lr", 1.0),
        ("train.dtype=bfloat16", "train", "dtype", "bfloat16"),
        ("train.sanity_checks=true", "train", "sanity_checks", True),
        ("layout.sequence_parallel=yes", "layout", "sequence_parallel", True),
        ("layout.rows=2", "layout", "rows", 2),
        ("data.path=/a folder/with=sign", "data", "path", Path("/a folder/with=sign")),
        ("model.dropout=0.1", "model", "dropout", 0.1),
        ("model.n_layers=2", "model", "n_layers", 2),
        ("model=gpt2-124m", "model", "hidden_size", 768),
    ],
)
def test_override(override: str, section: str, key: str, value: Any) -> None:
    found = getattr(getattr(parse_run(BASE, [override]), section), key)
    assert found == value
    assert type(found) is type(value) or isinstance(found, Path)


def test_overrides_leave_the_rest_alone() -> None:
    raw = {**BASE, "train": {"steps": 5}}
    run = parse_run(raw, ["train.lr=0.5", "model.dropout=0.1", "model.n_layers=2"])
    assert raw == {**BASE, "train": {"steps": 5}}, "the caller's mapping was changed"
    assert (run.train.steps, run.train.lr) == (5, 0.5)
    demo = ModelConfig(**shipped_model("demo-4m"))
    assert run.model == demo.model_copy(update={"dropout": 0.1, "n_layers": 2})


def test_later_overrides_win() -> None:
    run = parse_run(BASE, ["train.steps=1", "train.steps=2", "model.dropout=0.1", "model=demo-4m"])
    assert run.train.steps == 2
    assert run.model.dropout == 0.0


def test_feed_forward_follows_an_overridden_width() -> None:
    assert parse_run(BASE, ["model.hidden_size=512"]).model.ffn_size == 2048
    assert parse_run(BASE, ["model.ffn_size=100"]).model.ffn_size == 100


def test_override_of_the_models_name() -> None:
    assert parse_run(BASE, ["model.name=gpt2-355m"]).model.n_layers == 24


@given(value=st.integers(1, 3000))
def test_divisors(value: int) -> None:
    assert divisors(value) == [d for d in range(1, value + 1) if value % d == 0]


def test_any_of() -> None:
    assert any_of([4]) == "4"
    assert any_of([1, 2]) == "1 or 2"
    assert any_of([1, 2, 4]) == "1, 2 or 4"
    assert any_of(range(1, 21)) == "1, 2, 3, 4, 5, 6, ..., 18, 19 or 20"


def test_closest() -> None:
    assert closest("stpes", ["lr", "steps"]) == ": did you mean 'steps'?"
    assert closest("q", ["lr", "steps"]) == "; use one of lr, steps"
    assert closest("q", []) == ""


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "single device"),
        ({"dp": 2}, "dp=2"),
        ({"dp": 2, "dp_mode": "fsdp"}, "fsdp=2"),
        ({"scheme": "subgraph", "branches": 2, "dp_mode": "zero1"}, "subgraph, 2 branches (zero1)"),
        ({"scheme": "megatron", "cols": 4}, "megatron 1x4"),
        (
            {"scheme": "megatron", "cols": 4, "sequence_parallel": True, "dp": 2},
            "megatron 1x4, sequence parallel, dp=2",
        ),
        ({"scheme": "megatron_2d", "rows": 2, "cols": 3}, "megatron_2d 2x3"),
        ({"scheme": "optimus", "rows": 2, "cols": 3}, "optimus 2x3"),
        ({"pp": 2, "dp": 2}, "dp=2, pp=2"),
        (
            {"scheme": "megatron", "cols": 2, "pp": 4, "stages_per_rank": 3},
            "megatron 1x2, pp=4 x 3 stages, interleaved",
        ),
    ],
)
def test_description_of_a_layout(changes: dict[str, Any], text: str) -> None:
    assert describe_layout(LayoutConfig(**changes)) == text


def test_what_an_older_version_saved_is_read_with_the_new_names() -> None:
    saved = {"train": {"loss_tokens": 64, "steps": 3}, "data": {"path": "."}}
    assert with_new_names(saved)["train"] == {"loss_chunk_tokens": 64, "steps": 3}
    older = with_new_names({"train": {"steps": 3, "micro_batches": 4}})
    assert older == {"train": {"steps": 3}, "layout": {"micro_batches": 4}}
    assert saved["train"] == {"loss_tokens": 64, "steps": 3}, "the argument stays as it was"


def test_samples_are_packed_with_a_mask() -> None:
    chat = {**BASE, "data": {"path": "x", "task": "chat"}}
    t5 = {"family": "t5", "n_layers": 1, "hidden_size": 8, "n_heads": 2}
    pairs = {"model": t5, "data": {"path": "x", "task": "pairs"}}
    for raw in (chat, pairs):
        run = parse_run(raw, ["data.document_mask=true", "data.packing=documents"])
        assert run.data.packing == "documents"
