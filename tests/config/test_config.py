"""Configs: overrides, words of messages, mixtures, and the heads and epochs of fine-tuning."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gridformer.config import LayoutConfig, ModelConfig, RunConfig, parse_run, shipped_model
from gridformer.config.data import whole_weights
from gridformer.config.model import sizes_of_folder
from gridformer.data import resolve
from gridformer.parallel.registry import describe_layout
from gridformer.utils.errors import ConfigError
from tests.support.tasks import examples

BASE: dict[str, Any] = {"model": "demo-4m", "data": {"path": "somewhere"}}


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
        ("model.name=gpt2-355m", "model", "n_layers", 24),
        ("model.hidden_size=512", "model", "ffn_size", 2048),
        ("model.ffn_size=100", "model", "ffn_size", 100),
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
    run = parse_run(BASE, ["train.steps=1", "train.steps=2", "model.dropout=0.1", "model=demo-4m"])
    assert (run.train.steps, run.model.dropout) == (2, 0.0), "later overrides win"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "single device"),
        ({"scheme": "subgraph", "branches": 2, "dp_mode": "zero1"}, "subgraph, 2 branches (zero1)"),
        ({"scheme": "megatron", "cols": 4, "sequence_parallel": True, "dp": 2},
            "megatron 1x4, sequence parallel, dp=2"),
        ({"scheme": "optimus", "rows": 2, "cols": 3}, "optimus 2x3"),
        ({"scheme": "megatron", "cols": 2, "pp": 4, "stages_per_rank": 3},
            "megatron 1x2, pp=4 x 3 stages, interleaved"),
    ],
)  # fmt: skip
def test_description_of_a_layout(changes: dict[str, Any], text: str) -> None:
    assert describe_layout(LayoutConfig(**changes)) == text


def test_samples_are_packed_with_a_mask() -> None:
    chat = {**BASE, "data": {"path": "x", "task": "chat"}}
    t5 = {"family": "t5", "n_layers": 1, "hidden_size": 8, "n_heads": 2}
    pairs = {"model": t5, "data": {"path": "x", "task": "pairs"}}
    for raw in (chat, pairs):
        run = parse_run(raw, ["data.document_mask=true", "data.packing=documents"])
        assert run.data.packing == "documents"


TWO = [{"path": "data/web", "weight": 0.7}, {"path": "more/code files", "weight": 0.3}]


def a_run(data: Any, *overrides: str) -> RunConfig:
    return parse_run({"model": "demo-4m", "data": data}, overrides)


def test_a_list_is_a_mixture_whose_sources_are_named_after_their_folders() -> None:
    run = a_run(TWO, "data.seq_len=8")
    found = [(one.name, one.path, one.weight) for one in run.data.train_sources]
    assert found == [("web", Path("data/web"), 0.7), ("code-files", Path("more/code files"), 0.3)]
    assert run.data.seq_len == 8
    assert [(one.name, one.path, one.split) for one in run.data.validation_sets] == [
        ("web", Path("data/web"), "val"),
        ("code-files", Path("more/code files"), "val"),
    ]
    assert parse_run(yaml.safe_load(run.to_yaml())) == run


def test_a_path_is_one_source_without_a_name() -> None:
    data = a_run({"path": "x"}).data
    assert [(one.name, one.path) for one in data.train_sources] == [("", Path("x"))]
    assert [(one.name, one.path) for one in data.validation_sets] == [("", Path("x"))]
    mixed = a_run({"path": "x"}, "data.path=null", "data.sources=[{path: a}, {path: b}]").data
    assert [one.name for one in mixed.train_sources] == ["a", "b"]


def test_a_validation_set_takes_the_folder_of_a_source_by_its_name() -> None:
    sets = a_run({"sources": TWO, "validation": [{"name": "web"}, {"path": "x", "split": "train"}]})
    found = [(one.name, one.path, one.split) for one in sets.data.validation_sets]
    assert found == [("web", Path("data/web"), "val"), ("x", Path("x"), "train")]
    tests = a_run({"sources": TWO, "test": [{"name": "web"}, {"path": "held/out"}]}).data
    assert [(one.name, one.path) for one in tests.test_sets] == [
        ("web", Path("data/web")),
        ("out", Path("held/out")),
    ]
    assert a_run({"path": "x"}).data.test_sets == ()


def test_weights_are_exact_as_they_are_written() -> None:
    assert whole_weights([0.1, 0.2, 0.7]) == (1, 2, 7)
    assert whole_weights([1.0, 1.0, 1.0]) == (1, 1, 1)
    assert whole_weights([30.0, 0.0, 1e-2]) == (3000, 0, 1)


BERT = {"family": "bert", "n_layers": 1, "hidden_size": 8, "n_heads": 2, "max_seq_len": 32}


def run_of(task: str, model: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    return parse_run(
        {"model": BERT | (model or {}), "data": {"path": ".", "task": task}, "train": train}
    )


def test_tasks_choose_heads() -> None:
    for task, n_labels, spans in (
        ("classify", 3, False),
        ("choice", 1, False),
        ("regression", 1, False),
        ("answer", 0, True),
    ):
        model = run_of(task, {"n_labels": 3} if task == "classify" else {}).model
        assert (model.token_head, model.sentence_pair) == (False, False)
        assert (model.n_labels, model.span_head) == (n_labels, spans)
    again = parse_run(run_of("answer").model_dump(mode="json"))
    assert again == run_of("answer")
    gpt2 = run_of("classify", {"family": "gpt2", "n_labels": 2}).model
    assert (gpt2.token_head, gpt2.pooled_labels) == (False, False)
    assert gpt2.model_copy(update={"token_head": True}).pooled_labels


def test_both_stacks_of_t5_read_the_same_tokens() -> None:
    model = {"family": "t5", "n_labels": 2}
    run = run_of("classify", model)
    assert (run.source_len, run.seq_len) == (32, 32)
    values = {"model": BERT | model, "data": {"path": ".", "task": "classify", "source_len": 16}}
    with pytest.raises(ConfigError, match=r"read the same 32 tokens; use data\.source_len=0"):
        parse_run(values)
    assert parse_run(values, ["data.seq_len=16"]).source_len == 16


@pytest.mark.parametrize(
    ("shared", "width"),
    [({}, 32), ({"shared_expert_intermediate_size": 24}, 56), ({"n_shared_experts": 1}, 48)],
)
def test_a_token_passes_its_experts_and_those_of_all(
    shared: dict[str, int], width: int, tmp_path: Path
) -> None:
    """A folder says the width of what all tokens share, or the number of shared experts."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    experts = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "intermediate_size": 40}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **experts, **shared}))
    assert sizes_of_folder(str(tmp_path))["ffn_size"] == width


def test_epochs_and_warm_up_become_steps(tmp_path: Path) -> None:
    """60 pairs in batches of 8: 15 steps for 2 epochs, of which a fifth warms up."""
    folder = examples("mnli", tmp_path)
    run = run_of("classify", {"n_labels": 3}, epochs=2, warmup_fraction=0.2, global_batch=8)
    run = run.model_copy(update={"data": run.data.model_copy(update={"path": folder.path})})
    train = resolve(run, folder).train
    assert (train.steps, train.warmup_steps) == (15, 3)
    assert resolve(resolve(run, folder), folder) == resolve(run, folder)


def test_folders_of_other_examples(tmp_path: Path) -> None:
    folder = examples("race", tmp_path)
    for task, told in (
        ("classify", "contains no examples for data.task=classify.*--format mnli.*task=choice"),
        ("masked", "contains examples for fine-tuning.*use data.task=choice"),
    ):
        run = run_of(task, {"n_labels": 3} if task == "classify" else {})
        with pytest.raises(ConfigError, match=told):
            resolve(run, folder)
    run = parse_run({"model": BERT, "data": {"path": ".", "task": "choice", "n_choices": 3}})
    with pytest.raises(ConfigError, match=r"use data\.n_choices=4"):
        resolve(run, folder)
