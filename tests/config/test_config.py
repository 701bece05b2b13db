"""Configs: what they refuse and with which messages, and overrides."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridformer.config import (
    LayoutConfig,
    ModelConfig,
    TrainConfig,
    any_of,
    closest,
    configs_dir,
    divisors,
    model_names,
    parse_run,
    shipped_model,
)
from gridformer.config.synonyms import with_new_names
from gridformer.parallel.registry import describe_layout
from gridformer.utils.errors import ConfigError

RUN_FILES = sorted((configs_dir() / "runs").glob("*.yaml"))
BASE: dict[str, Any] = {"model": "demo-4m", "data": {"path": "somewhere"}}


def problems(raw: dict[str, Any], *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_run(raw, overrides)
    assert str(error.value) == "\n".join(error.value.problems)
    return error.value.problems


def problem(raw: dict[str, Any], *overrides: str) -> str:
    (only,) = problems(raw, *overrides)
    return only


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("raw", "key", "meant"),
    [
        ({"trian": {}}, "trian", "train"),
        ({"train": {"stpes": 5}}, "train.stpes", "steps"),
        ({"layout": {"columns": 2}}, "layout.columns", "cols"),
        ({"layout": {"row": 2}}, "layout.row", "rows"),
        ({"data": {"path": "x", "seqlen": 2}}, "data.seqlen", "seq_len"),
        ({"model": {"name": "demo-4m", "n_layer": 2}}, "model.n_layer", "n_layers"),
    ],
)
def test_unknown_key_names_the_closest(raw: dict[str, Any], key: str, meant: str) -> None:
    assert problem({**BASE, **raw}) == f"run: unknown key {key}: did you mean '{meant}'?"


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("train.batch_size=8", "global_batch"),
        ("train.learning-rate=1", "lr"),
        ("train.max_steps=8", "steps"),
        ("layout.tp=2", "cols"),
        ("layout.tensor_parallel_size=2", "cols"),
        ("layout.pipeline_parallel_size=2", "pp"),
        ("train.gradient_accumulation_steps=2", "layout.micro_batches"),
        ("model.n_head=2", "n_heads"),
        ("model.hidden=64", "hidden_size"),
        ("model.d_model=64", "hidden_size"),
        ("model.seq_len=64", "max_seq_len"),
        ("lr=1", "train.lr"),
        ("batch_size=8", "train.global_batch"),
        ("train.seq_len=64", "data.seq_len"),
        ("train.bf16=true", "train.dtype=bfloat16"),
        ("train.fp16=true", "train.dtype=float16"),
        ("train.device=gpu", "cuda"),
        ("layout.dp_mode=ddp", "replicate"),
        ("layout.scheme=fsdp", "layout.dp_mode=fsdp"),
        ("data.loss_tokens=64", "train.loss_chunk_tokens"),
    ],
)
def test_words_of_other_libraries_are_told_what_they_are_here(override: str, meant: str) -> None:
    assert f"did you mean '{meant}'" in problem(BASE, override)


def test_a_value_that_resembles_nothing_is_told_what_is_known_once() -> None:
    text = problem(BASE, "layout.scheme=zzqzz")
    assert text.count("megatron_2d") == 1
    assert text.endswith("'optimus' or 'subgraph'")


def test_unknown_key_that_resembles_nothing_lists_what_is_known() -> None:
    text = problem(BASE, "train.zzqzz=1")
    assert text.startswith("argument train.zzqzz=1: unknown key train.zzqzz; use one of ")
    known = text.partition("use one of ")[2].split(", ")
    assert known == list(TrainConfig.model_fields)


def test_all_problems_at_once() -> None:
    raw = {
        **BASE,
        "trian": {},
        "layout": {"scheme": "optmus", "rows": 0},
        "train": {"lr": -1, "steps": "many", "stpes": 3, "dtype": "flaot32"},
    }
    found = problems(raw)
    for text in (
        "unknown key trian",
        "layout.scheme=optmus: input should be 'single', 'megatron', 'megatron_2d', 'optimus' or "
        "'subgraph': did you mean 'optimus'?",
        "layout.rows=0: input should be greater than or equal to 1",
        "train.lr=-1: input should be greater than 0",
        "train.steps=many: input should be a valid integer",
        "unknown key train.stpes",
        "did you mean 'float32'?",
    ):
        assert sum(text in each for each in found) == 1, (text, found)
    assert len(found) == 7


@pytest.mark.parametrize("missing", ["data", "data.path"])
def test_missing_key(missing: str) -> None:
    raw = {"model": "demo-4m"} if missing == "data" else {**BASE, "data": {}}
    assert problem(raw).startswith(f"run: {missing} is missing")


def test_missing_keys_of_a_model() -> None:
    found = problems({**BASE, "model": {"n_layers": 2}})
    assert found == ["run: model.hidden_size is missing", "run: model.n_heads is missing"]


def test_missing_model() -> None:
    assert problem({"data": {"path": "x"}}) == "run: model is missing"


def test_unknown_model_names_the_closest() -> None:
    text = "model: no shipped model is called 'gpt2-125m': did you mean 'gpt2-124m'?"
    for model in ("gpt2-125m", {"name": "gpt2-125m"}):
        assert problem({**BASE, "model": model}) == text
    assert problem(BASE, "model=gpt2-125m") == f"argument model=gpt2-125m: {text[7:]}"
    assert ", ".join(model_names()) in problem({**BASE, "model": "zzzz"})


@pytest.mark.parametrize(
    ("raw", "key", "section"),
    [
        ({"model": {"n_layers": 1, "hidden_size": 48, "n_heads": 5}}, "n_heads", "model"),
    ],
)
def test_every_divisor_that_is_offered_works(raw: dict[str, Any], key: str, section: str) -> None:
    offer = problem({**BASE, **raw}).partition(f": use {key} ")[2]
    values = [int(number) for number in re.findall(r"\d+", offer)]
    assert len(values) > 3
    for value in values:
        run = parse_run({**BASE, **raw}, [f"{section}.{key}={value}"])
        assert getattr(getattr(run, section), key) == value


def test_configs_are_frozen() -> None:
    run = parse_run(BASE)
    with pytest.raises(ValueError, match="frozen"):
        run.train.steps = 5


# --------------------------------------------------------------------------- overrides


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


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("train.steps", "'train.steps' is not an override: write section.key=value"),
        ("=5", "'=5' is not an override"),
        ("train.steps.more=1", "train.steps"),
        ("name.more=1", "'name.more=1': name is a value, not a section"),
        ("train.steps=1.5", "train.steps=1.5: input should be a valid integer"),
        ("train.lr=", "train.lr=: input should be a valid number"),
        ("train.lr=[1", "train.lr=[1: input should be a valid number"),
        ("train.lr=.nan", "train.lr=nan: input should be a finite number"),
        ("train=5", "train=5: must be a section with keys of its own, such as train.steps=1000"),
        ("layout=optimus", "such as layout.scheme=optimus"),
        ("layout=gpu", "such as layout.scheme=optimus"),
        ("train.loggers=mlflow", "must be a list, such as 'train.loggers=[mlflow]'"),
        ("train.loggers=wandb,mlflow", "such as 'train.loggers=[wandb,mlflow]'"),
        ("train.loggers=5", "such as 'train.loggers=[wandb]'"),
        ("data.sources=[a]", "data.sources.0=a: must be a section with keys of its own"),
        ("data.path=[a]", "data.path: must be a path"),
    ],
)
def test_override_that_is_wrong(override: str, text: str) -> None:
    assert text in problem({**BASE, "name": "x"}, override)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("trian.steps=3", "argument trian.steps=3: unknown key trian: did you mean 'train'?"),
        ("train.lr=fast", "argument train.lr=fast: input should be a valid number"),
        ("train.update=in_backward", "argument train.update=in_backward: train: update="),
        ("data.task=pairs", "argument data.task=pairs: "),
    ],
)
def test_a_mistake_on_the_command_line_is_not_blamed_on_the_file(override: str, text: str) -> None:
    """Conversely, a mistake in the file is not blamed on an argument."""
    assert problem(BASE, "train.steps=5", override, "model.dropout=0.1").startswith(text)
    key, _, value = override.partition("=")
    section, _, name = key.partition(".")
    raw = {**BASE, section: {**BASE.get(section, {}), name: value}}
    assert problem(raw, "train.steps=5", "train.seed=1").startswith("run: ")


# --------------------------------------------------------------------------- words and numbers


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


def test_older_runs_keep_their_micro_batches() -> None:
    """Micro-batches used to be in the section `train`; old run directories are still read."""
    run = parse_run({**BASE, "train": {"global_batch": 8, "micro_batches": 4}})
    assert run.layout.micro_batches == 4
    assert parse_run({**BASE, "layout": {"dp": 2}}, ["train.micro_batches=2"]).layout.dp == 2


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"family": "t5", "n_labels": 3}, "t5 has this head only with token_head=false"),
        ({"family": "transformer", "n_labels": 3}, "belongs to family gpt2, bert, t5 or llama"),
        ({"family": "bert", "n_decoder_layers": 2}, "belongs to family t5 or transformer"),
        ({"family": "t5", "norm_position": "post"}, "norm_position=post: t5 normalizes inputs"),
        ({"family": "gpt2", "relative_buckets": 8}, "relative_buckets=8 belongs to family t5"),
        ({"family": "gpt2", "n_kv_heads": 1}, "n_kv_heads=1 belongs to family llama, not gpt2"),
        ({"family": "llama", "n_heads": 4, "n_kv_heads": 3}, "use n_kv_heads=1, 2 or 4"),
        ({"family": "llama", "head_dim": 3}, "a head has 3: use head_dim=4"),
        ({"family": "llama", "norm_position": "post"}, "llama normalizes inputs; use pre"),
    ],
)
def test_what_a_family_does_not_have_is_refused(model: dict[str, Any], text: str) -> None:
    size = {"n_layers": 2, "hidden_size": 8, "n_heads": 2}
    assert text in problem({**BASE, "model": {**size, **model}})


@pytest.mark.parametrize(
    ("scaling", "text"),
    [
        ({"kind": "llama3"}, "needs original_max_position_embeddings"),
        ({"kind": "yarn", "low_freq_factor": 2.0}, "low_freq_factor=2.0 does not belong to kind"),
        ({"kind": "linear", "beta_fast": 8.0}, "beta_fast=8.0 does not belong to kind=linear"),
        ({"kind": "linear", "original_max_position_embeddings": 8}, "does not belong to kind"),
        ({"kind": "yarn", "beta_fast": 1.0}, "beta_slow=1.0 must be below beta_fast=1.0"),
        ({"kind": "llama3", "low_freq_factor": 5.0}, "must be below high_freq_factor=4.0"),
        ({"kind": "linear", "truncat": 1}, "did you mean 'truncate'?"),
    ],
)
def test_scaling_of_rotary_positions(scaling: dict[str, Any], text: str) -> None:
    model = {"family": "llama", "n_layers": 2, "hidden_size": 8, "n_heads": 2}
    given = {**model, "rope_scaling": {"factor": 2.0, **scaling}}
    assert text in problem({**BASE, "model": given})


@pytest.mark.parametrize(
    ("model", "data", "text"),
    [
        ({}, {"packing": "documents"}, "must not see each other; use data.document_mask=true"),
        ({"family": "bert"}, {}, "data.task=masked (bert) are not running text; use"),
        ({"n_labels": 2}, {}, "with model.n_labels=2 each sample is one document; use"),
    ],
)
def test_documents_share_samples_of_running_text_only(
    model: dict[str, Any], data: dict[str, Any], text: str
) -> None:
    sizes = {"n_layers": 1, "hidden_size": 8, "n_heads": 2}
    mask = {} if "packing" in data else {"document_mask": True}
    run = {"model": {**sizes, **model}, "data": {"path": "somewhere", **mask, **data}}
    assert text in problem(run)


def test_tasks_belong_to_families() -> None:
    text = problem(BASE, "data.task=pairs")
    assert text.endswith(
        "gpt2 learns from causal, classify, regression, choice, answer or chat; use data.task="
        "auto, causal, classify, regression, choice, answer or chat"
    )


def test_conversations_share_a_sample_only_if_packed() -> None:
    chat = {**BASE, "data": {**BASE["data"], "task": "chat"}}
    assert "use data.packing=documents to put several" in problem(chat, "data.document_mask=true")
    assert "conversations have no labels; use model.n_labels=0" in problem(chat, "model.n_labels=2")
    parse_run(chat, ["data.document_mask=true", "data.packing=documents"])


def test_pairs_share_a_sample_only_if_packed() -> None:
    model = {"family": "t5", "n_layers": 1, "hidden_size": 8, "n_heads": 2}
    pairs = {"model": model, "data": {"path": "somewhere", "task": "pairs"}}
    packed = ["data.document_mask=true", "data.packing=documents"]
    text = problem(pairs, packed[0])
    assert "data.task=pairs is one pair; use data.packing=documents to put several" in text
    assert "must not see each other; use data.document_mask=true" in problem(pairs, packed[1])
    text = problem(pairs, *packed, "data.reset_positions=false")
    assert "begin at position 0 each; use data.reset_positions=true" in text
    for task in ("spans", "answer"):
        wanted = f"samples of data.task={task} (t5) are not running text; use"
        assert wanted in problem(pairs, *packed, f"data.task={task}")
    assert parse_run(pairs, packed).data.packing == "documents"


def test_an_old_key_is_refused_with_its_new_name() -> None:
    with pytest.raises(ConfigError, match=r"use train\.loss_chunk_tokens=64"):
        parse_run({"model": {"n_layers": 1}, "data": {"path": "."}}, ["train.loss_tokens=64"])


def test_what_an_older_version_saved_is_read_with_the_new_names() -> None:
    saved = {"train": {"loss_tokens": 64, "steps": 3}, "data": {"path": "."}}
    assert with_new_names(saved)["train"] == {"loss_chunk_tokens": 64, "steps": 3}
    assert saved["train"] == {"loss_tokens": 64, "steps": 3}, "the argument stays as it was"
