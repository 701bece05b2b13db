"""Shipped run files and models, files that are no run files, and the YAML round trip."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gridformer.config import (
    DataConfig,
    LayoutConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    configs_dir,
    load_run,
    model_names,
    parse_run,
    shipped_model,
)
from gridformer.launch.plan import read_run_without_data
from gridformer.models import build_model
from gridformer.parallel import validation as layout
from gridformer.utils.errors import ConfigError

RUN_FILES = sorted((configs_dir() / "runs").glob("*.yaml"))
BASE: dict[str, Any] = {"model": "demo-4m", "data": {"path": "somewhere"}}


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_shipped_run_files_work_as_they_are(path: Path) -> None:
    assert RUN_FILES
    for run in (load_run(path), load_run(path.stem), load_run(f"configs/runs/{path.name}")):
        assert run == load_run(path)
        layout.check_layout(run)


SIZES = {  # published N, h and n, and parameters where a paper counts them
    "gpt-110m": (12, 768, 12, 116_536_320),  # as in Hugging Face's OpenAIGPT, plus a last norm
    "gpt2-124m": (12, 768, 12, 124_439_808),
    "gpt2-355m": (24, 1024, 16, 354_823_168),
    "gpt2-774m": (36, 1280, 20, 774_030_080),
    "gpt2-1.5b": (48, 1600, 25, 1_557_611_200),
    "megatron-1.2b": (40, 1536, 16, 1.2e9),
    "megatron-2.5b": (54, 1920, 20, 2.5e9),
    "megatron-4.2b": (64, 2304, 24, 4.2e9),
    "megatron-8.3b": (72, 3072, 32, 8.3e9),
    "megatron-8.3b-24heads": (72, 3072, 24, 8.3e9),
    "turing-nlg-17b": (78, 4256, 28, 17.2e9),
    "gpt-162.2b": (32, 20480, 128, 162.2e9),
    "gpt-175b": (96, 12288, 96, 175e9),
    "gpt-530b": (105, 20480, 128, 530e9),
    "gpt-1t": (128, 25600, 160, 1008e9),
    "bert-base": (12, 768, 12, 110_106_428),  # as Hugging Face counts BertForPreTraining
    "bert-large": (24, 1024, 16, 336_226_108),
    "megatron-bert-336m": (24, 1024, 16, 336e6),
    "megatron-bert-1.3b": (24, 2048, 32, 1.3e9),
    "megatron-bert-3.9b": (48, 2560, 40, 3.9e9),
    "t5-small": (6, 512, 8, 60_506_624),  # as Hugging Face counts them
    "t5-base": (12, 768, 12, 222_903_552),
    "t5-large": (24, 1024, 16, 737_668_096),
    "t5-large-mod": (24, 1024, 32, 737_669_120),  # bias tables for 16 more heads
    "transformer-base": (6, 512, 8, 65e6),
    "transformer-big": (6, 1024, 16, 213e6),
    "smollm2-135m": (30, 576, 9, 135e6),
    "smollm2-360m": (32, 960, 15, 362e6),
    "smollm2-1.7b": (24, 2048, 32, 1.71e9),
    "llama-3.2-1b": (16, 2048, 32, 1.24e9),
    "llama-3.2-3b": (28, 3072, 24, 3.21e9),
    "llama-3.1-8b": (32, 4096, 32, 8.03e9),
    "llama-3.1-70b": (80, 8192, 64, 70.6e9),
    "llama-3.1-405b": (126, 16384, 128, 406e9),
    "mistral-7b": (32, 4096, 32, 7.24e9),
    "qwen3-0.6b": (28, 1024, 16, 0.6e9),
    "qwen3-8b": (36, 4096, 32, 8.2e9),
    "qwen3-32b": (64, 5120, 64, 32.8e9),
    "mixtral-8x7b": (32, 4096, 32, 46_702_792_704),  # as Hugging Face counts them
    "mixtral-8x22b": (56, 6144, 48, 140_620_634_112),
    "qwen3-30b-a3b": (48, 2048, 32, 30_532_122_624),
    "qwen3-235b-a22b": (94, 4096, 64, 235_093_634_560),
    "olmoe-1b-7b": (16, 2048, 16, 6_919_161_856),
    "deepseek-v3-shaped": (61, 7168, 128, 671e9),
}


@pytest.mark.parametrize("name", model_names())
def test_shipped_models_have_the_sizes_of_their_names(name: str) -> None:
    run = parse_run({**BASE, "model": name}, ["train.global_batch=8"])
    layout.check_layout(run)
    model = run.model
    assert model.name == name
    if not model.vocab_size:  # the vocabulary comes from the data
        model = model.model_copy(update={"vocab_size": 512})
    with torch.device("meta"):
        n_parameters = sum(p.numel() for p in build_model(model).parameters())
    if name == "demo-4m":
        assert 3e6 < n_parameters < 5e6
        return
    *shape, count = SIZES[name]
    assert [model.n_layers, model.hidden_size, model.n_heads] == shape
    assert n_parameters == (count if isinstance(count, int) else pytest.approx(count, rel=0.04))


def test_a_model_of_unknown_vocabulary_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        build_model(parse_run(BASE).model)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("no.yaml", r"no\.yaml: no such run file; shipped run files are .*demo"),
        ("nowhere/nothing.json", "no such run file; shipped"),
        ("dmeo", r"dmeo: no such run file: did you mean 'demo'\?"),
        ("mien.yaml", r"mien\.yaml: no such run file: did you mean 'mine\.yaml'\?"),
        ("sub/ohter.yml", r"sub/ohter\.yml: no such run file: did you mean 'sub/other\.yml'\?"),
        ("lama-3.1-8b", r"did you mean 'llama-3.1-8b'\? It is a shipped model: .*`llama model="),
        ("model=gpt2-124m", "one comes before what changes it, such as `demo model=gpt2-124m`"),
    ],
)
def test_file_that_is_missing(
    typed: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names a shipped one or one that is beside it."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine.yaml", "notes.txt", "sub/other.yml"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    with pytest.raises(ConfigError, match=told):
        load_run(typed)


def test_model_that_is_missing() -> None:
    with pytest.raises(ConfigError, match="t5-larg: no such run file or model: did you mean 't5-l"):
        read_run_without_data("t5-larg")


def test_a_folder_takes_the_name_of_nothing_that_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the folder of an imported model, named as the model is."""
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "gpt2-124m", "other"):
        (tmp_path / name).mkdir()
    assert load_run("demo").name == "demo"
    assert read_run_without_data("gpt2-124m").model.name == "gpt2-124m"
    with pytest.raises(ConfigError, match=r"other: cannot be read .*a folder"):
        load_run("other")
    with pytest.raises(ConfigError, match="gpt2-124m is a shipped model"):
        load_run("gpt2-124m")


def test_a_model_in_place_of_a_run_file_is_told_a_run_file_of_its_family() -> None:
    """What the message says is a run of that model."""
    for name in model_names():
        with pytest.raises(ConfigError, match="is a shipped model and not a run file") as error:
            load_run(name)
        file, override = str(error.value).rstrip("`").split("such as `")[1].split()
        run = load_run(file, [override])
        assert (run.model.name, run.model.family) == (name, shipped_model(name)["family"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [1", "is not valid YAML"),
        ("- 1\n- 2\n", "must be a mapping"),
        ("just words", "must be a mapping"),
        ("", "must be a mapping"),
        ("\x00", "is not valid YAML"),
        ("a: 1\nb: 2\na: 3", r"line 3, column 1: the key a occurs twice, first in line 1"),
        ("a: &x [1]\nb: *x", "line 2, column 4: aliases are not supported"),
        ("a: " + 60 * "[" + 60 * "]", "nested deeper than 50 levels"),
        ("a: 2024-13-45", "2024-13-45 is not valid as timestamp"),
    ],
)
def test_file_that_is_no_run_file(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"run\.yaml: .*{told}"):
        load_run(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run(tmp_path)


def test_problems_and_name_come_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my-run.yaml"
    path.write_text(yaml.safe_dump(BASE))
    assert load_run(path).name == "my-run"
    path.write_text(yaml.safe_dump({**BASE, "train": {"stpes": 5}}))
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: unknown key train.stpes"):
        load_run(path, ["train.steps=5"])


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1)
SMALL = st.integers(1, 9)
RATES = st.floats(1e-12, 10.0)
RUNS = st.builds(
    RunConfig,
    name=WORDS,
    model=st.builds(
        lambda heads, width, **rest: ModelConfig(n_heads=heads, hidden_size=heads * width, **rest),
        heads=SMALL,
        width=SMALL,
        name=WORDS | st.just("demo-4m"),
        n_layers=SMALL,
        ffn_size=st.integers(0, 99),
        vocab_size=st.integers(0, 99),
        dropout=st.floats(0.0, 0.99),
        norm_eps=RATES,
    ),
    layout=st.builds(LayoutConfig, rows=SMALL, cols=SMALL, sequence_parallel=st.booleans()),
    data=st.builds(DataConfig, path=WORDS, seq_len=SMALL),
    train=st.builds(
        TrainConfig,
        seed=st.integers(0, 2**63 - 1),
        lr=RATES,
        adam_eps=RATES,
        timeout_s=st.floats(1.0, 1e8),
        sanity_checks=st.booleans(),
    ),
)


@given(run=RUNS)
def test_yaml_round_trip(run: RunConfig) -> None:
    """A run is read back from its run directory unchanged, to the last bit."""
    assert parse_run(yaml.safe_load(run.to_yaml())) == run


def test_yaml_holds_every_key() -> None:
    """The file holds resolved values: a later version's defaults do not change an old run."""
    raw = yaml.safe_load(parse_run(BASE).to_yaml())
    assert raw.keys() == RunConfig.model_fields.keys()
    for section in ("model", "layout", "data", "train"):
        known = RunConfig.model_fields[section].annotation
        assert isinstance(known, type)
        assert raw[section].keys() == known.model_fields.keys()


def test_the_model_of_a_run_directory(tmp_path: Path) -> None:
    """It is that of `model: DIRECTORY`, and of train.init_from alone; a task chooses its heads."""
    there = parse_run({"model": "demo-4m", "data": {"path": "x"}})
    (tmp_path / "config.yaml").write_text(there.to_yaml(), encoding="utf-8")
    data: dict[str, Any] = {"data": {"path": "y"}}
    for run in (
        parse_run({"model": str(tmp_path), **data}),
        parse_run(data, [f"train.init_from={tmp_path}"]),
        parse_run({"train": {"init_from": str(tmp_path)}, **data}),
    ):
        assert run.model == there.model
    labels = parse_run({"data": {"path": "y", "task": "regression"}}, [f"model={tmp_path}"])
    assert labels.model.n_labels == 1
    assert labels.model.hidden_size == there.model.hidden_size
