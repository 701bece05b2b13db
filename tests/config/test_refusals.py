"""What a run file or an override is refused for, and the sentence that says so."""

import re
from typing import Any

import pytest

from gridformer.config import TrainConfig, model_names, parse_run, schemes
from gridformer.utils.errors import ConfigError

BASE: dict[str, Any] = {"model": "demo-4m", "data": {"path": "somewhere"}}
TINY: dict[str, Any] = {**BASE, "model": {"n_layers": 2, "hidden_size": 8, "n_heads": 2}}
T5, LLAMA, BERT = "model.family=t5", "model.family=llama", "model.family=bert"
MASK, PACKED = "data.document_mask=true", "data.packing=documents"
LINEAR = "model.rope_scaling={factor: 2, kind: linear, "
YARN, LLAMA3 = LINEAR.replace("linear", "yarn"), LINEAR.replace("linear", "llama3")
SOURCES = "sources: [{path: data/web, weight: 0.7}, {path: more/code files, weight: 0.3}]"


def problems(raw: dict[str, Any], *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_run(raw, overrides)
    assert str(error.value) == "\n".join(error.value.problems)
    return error.value.problems


def problem(raw: dict[str, Any], *overrides: str) -> str:
    (only,) = problems(raw, *overrides)
    return only


# Words of other libraries, mistyped words, and values of other keys.
MEANT = {
    "trian.steps=1": "train",
    "train.stpes=5": "steps",
    "train.batch_size=8": "global_batch",
    "layout.tp=2": "cols",
    "lr=1": "train.lr",
    "train.seq_len=64": "data.seq_len",
    "train.bf16=true": "train.dtype=bfloat16",
    "train.device=gpu": "cuda",
    "layout.dp_mode=ddp": "replicate",
    "layout.scheme=fsdp": "layout.dp_mode=fsdp",
    "data.loss_tokens=64": "train.loss_chunk_tokens",
    "train.loss_tokens=64": "loss_chunk_tokens",
    "train.micro_batches=2": "layout.micro_batches",
    LINEAR + "truncat: 1}": "truncate",
    "data=[{path: a, wieght: 1}]": "weight",
}

# Each sentence, or a part of it, with the overrides of TINY that cause it.
REFUSED: list[tuple[str, ...]] = [
    ("'train.steps' is not an override: write section.key=value", "train.steps"),
    ("train.steps", "train.steps.more=1"),
    ("'name.more=1': name is a value, not a section", "name=x", "name.more=1"),
    ("train.steps=1.5: must be a whole number", "train.steps=1.5"),
    ("argument layout.cols=two: must be a whole number", "layout.cols=two"),
    ("argument train.deterministic=maybe: must be true or false", "train.deterministic=maybe"),
    ("argument name=5: must be a text", "name=5"),
    ("train.lr=nan: must be a finite number", "train.lr=.nan"),
    ("train=5: must be a section with keys of its own, such as train.steps=1000", "train=5"),
    ("must be a list, such as 'train.loggers=[wandb]'", "train.loggers=mlflow"),
    ("data.sources.0=a: must be a section with keys of its own", "data.sources=[a]"),
    ("data.path: must be a path", "data.path=[a]"),
    # families
    ("t5 has this head only with token_head=false", T5, "model.n_labels=3"),
    ("family gpt2, bert, t5 or llama", "model.family=transformer", "model.n_labels=3"),
    ("belongs to family t5 or transformer", BERT, "model.n_decoder_layers=2"),
    ("norm_position=post: t5 normalizes inputs", T5, "model.norm_position=post"),
    ("relative_buckets=8 belongs to family t5", "model.relative_buckets=8"),
    ("n_kv_heads=1 belongs to family llama or network, not gpt2", "model.n_kv_heads=1"),
    ("use n_kv_heads=1, 2 or 4", LLAMA, "model.n_heads=4", "model.n_kv_heads=3"),
    ("a head has 3: use head_dim=4", LLAMA, "model.head_dim=3"),
    ("llama normalizes inputs; use pre", LLAMA, "model.norm_position=post"),
    # rotary positions
    ("needs original_max_position_embeddings", LLAMA, LLAMA3 + "}"),
    ("low_freq_factor=2.0 does not belong to kind", LLAMA, YARN + "low_freq_factor: 2}"),
    ("beta_fast=8.0 does not belong to kind=linear", LLAMA, LINEAR + "beta_fast: 8}"),
    ("beta_slow=1.0 must be below beta_fast=1.0", LLAMA, YARN + "beta_fast: 1}"),
    ("must be below high_freq_factor=4.0", LLAMA, LLAMA3 + "low_freq_factor: 5}"),
    # tasks and documents
    (
        "gpt2 learns from causal, classify, regression, choice, answer or chat; use data.task="
        "auto, causal, classify, regression, choice, answer or chat",
        "data.task=pairs",
    ),
    ("must not see each other; use data.document_mask=true", PACKED),
    ("data.task=masked (bert) are not running text; use", BERT, MASK),
    ("with model.n_labels=2 each sample is one document; use", "model.n_labels=2", MASK),
    ("use data.packing=documents to put several", "data.task=chat", MASK),
    ("conversations have no labels; use model.n_labels=0", "data.task=chat", "model.n_labels=2"),
    ("data.task=pairs is one pair; use data.packing=documents", T5, "data.task=pairs", MASK),
    ("must not see each other; use data.document_mask=true", T5, "data.task=pairs", PACKED),
    ("begin at position 0 each; use data.reset_positions=true",
        *(T5, "data.task=pairs", MASK, PACKED, "data.reset_positions=false")),
    ("data.task=spans (t5) are not running text", T5, "data.task=spans", MASK, PACKED),
    # heads
    ("needs model.n_labels, the number of labels: use", BERT, "data.task=classify"),
    ("use model.token_head=false",
        *(BERT, "data.task=classify", "model.n_labels=2", "model.token_head=true")),
    ("use model.n_labels=1, or leave it out", BERT, "data.task=choice", "model.n_labels=4"),
    ("use model.n_labels=0", BERT, "data.task=answer", "model.n_labels=2"),
    ("use data.task=classify, regression, choice or", BERT, "model.span_head=true"),
    # mixtures
    ("data.path=x and data.sources are both set: use data.path=null with the sources",
        f"data={{path: x, {SOURCES}}}"),
    ("two sources called a: give each a name of its own", "data=[{path: a}, {path: b/a}]"),
    ("data.sources.0.name is missing: give the source a name", "data=[{path: .}]"),
    ("data.sources.0.name: 'x/y' is not a source name", "data=[{path: a, name: x/y}]"),
    ("tokens is the name of a loss: use another", "data=[{path: a, name: tokens}]"),
    ("the weights of data.sources are all 0: give at least one", "data=[{path: a, weight: 0}]"),
    (
        "repeats only after 4567897 samples, and at most 100000 are kept in memory: use {a: "
        "0.2703, b: 0.7297}",
        "data=[{path: a, weight: 0.1234567}, {path: b, weight: 0.333333}]",
    ),
    ("stages needs data.sources", "data={path: x, stages: [{from_step: 9, weights: {}}]}"),
    ("data.stages.0.weights names webb, but data.sources has web or code-files",
        f"data={{{SOURCES}, stages: [{{from_step: 9, weights: {{webb: 1}}}}]}}"),
    (
        "data.stages.1.from_step=9 is not after step 9, with which the stage before it begins: use "
        "10 or more",
        f"data={{{SOURCES}, stages: [{', '.join(['{from_step: 9, weights: {web: 1}}'] * 2)}]}}",
    ),
    ("the weights of data.stages.0 are all 0",
        f"data={{{SOURCES}, stages: [{{from_step: 9, weights: {{web: 0}}}}]}}"),
    ("data.validation.0.path is missing", "data={path: x, validation: [{name: a}]}"),
    ("data.validation.0 names wbe, but data.sources has web or code-files",
        f"data={{{SOURCES}, validation: [{{name: wbe}}]}}"),
    ("has two sets called a", "data={path: x, validation: [{path: a}, {path: b/a}]}"),
]  # fmt: skip


@pytest.mark.parametrize("override", MEANT)
def test_a_word_that_is_unknown_is_told_what_is_meant(override: str) -> None:
    model = {**TINY["model"], "family": "llama"} if "rope" in override else BASE["model"]
    assert f"did you mean '{MEANT[override]}'" in problem({**BASE, "model": model}, override)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0][:40])
def test_a_value_that_does_not_fit(case: tuple[str, ...]) -> None:
    text, *overrides = case
    assert text in problem(TINY, *overrides)


def test_what_resembles_nothing_is_told_all_that_is_known() -> None:
    text = problem(BASE, "layout.scheme=zzqzz")
    assert re.findall("'(\\w+)'", text) == [*schemes()]
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
        "run: unknown key trian: did you mean 'train'?",
        "layout.scheme=optmus: must be 'single', 'megatron', 'megatron_2d', 'optimus'",
        "layout.rows=0: must be greater than or equal to 1",
        "train.lr=-1: must be greater than 0",
        "train.steps=many: must be a whole number",
        "unknown key train.stpes",
        "did you mean 'float32'?",
    ):
        assert sum(text in each for each in found) == 1, (text, found)
    assert len(found) == 7


def test_missing_keys() -> None:
    assert problem({"model": "demo-4m"}) == "run: data is missing"
    assert problem({**BASE, "data": {}}).startswith("run: data.path is missing")
    assert problem({"data": {"path": "x"}}) == "run: model is missing"
    found = problems({**BASE, "model": {"n_layers": 2}})
    assert found == ["run: model.hidden_size is missing", "run: model.n_heads is missing"]


def test_unknown_model_names_the_closest() -> None:
    text = "model: no shipped model is called 'gpt2-125m': did you mean 'gpt2-124m'?"
    for model in ("gpt2-125m", {"name": "gpt2-125m"}, {"name": "gpt2-125m", "dropout": 0.1}):
        assert problem({**BASE, "model": model}) == text
    assert problem(BASE, "model=gpt2-125m") == f"argument model=gpt2-125m: {text[7:]}"
    assert ", ".join(model_names()) in problem({**BASE, "model": "zzzz"})


def test_every_divisor_that_is_offered_works() -> None:
    raw = {**BASE, "model": {"n_layers": 1, "hidden_size": 48, "n_heads": 5}}
    values = re.findall(r"\d+", problem(raw).partition(": use n_heads ")[2])
    assert len(values) > 3
    for value in values:
        assert parse_run(raw, [f"model.n_heads={value}"]).model.n_heads == int(value)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("trian.steps=3", "argument trian.steps=3: unknown key trian: did you mean 'train'?"),
        ("train.lr=fast", "argument train.lr=fast: must be a number"),
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
