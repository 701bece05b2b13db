"""Numbers equal those of lm-evaluation-harness with the exported model, on local tasks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import yaml

from gridformer.checkpoint.convert.exporting import export_run
from gridformer.config import parse_run
from gridformer.evaluate.loading import load_model
from gridformer.evaluate.tasks import Options, measure, parse_tasks
from tests.support.checkpoints import save_model

pytestmark = pytest.mark.full
lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: gridformer[lm-eval]")
pytest.importorskip("accelerate", reason="lm-eval runs transformers' models with it: lm-eval[hf]")

LENGTH = 32
PAGES = [
    ' = A page = \n \n The " well @-@ known " 1 @,@ 000 lines ( of files ) , it \'s here . \n' * 3,
    " = Another = \n \n = = Section = = \n \n More lines of text , indeed : 2 @.@ 5 of them . \n",
]
TEXTS = ["line 1 of file 2", "line 22 of a file: 3 and 4", "file " * 30 + "line"]
CHOICES = [("line 3 of", [" file", " and the other"], 0), ("5 and", [" 6", " line"], 1)]


@pytest.fixture(scope="module", params=["plain", "with begin of text"])
def run_dir(
    request: pytest.FixtureRequest, token_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run whose tokenizer puts nothing before a text, as GPT-2's, or a token, as Llama's."""
    out = tmp_path_factory.mktemp("run")
    model = {
        "n_layers": 2, "hidden_size": 32, "n_heads": 4, "max_seq_len": LENGTH, "vocab_size": 302,
        "init_std": 0.2,
    }  # fmt: skip
    run = parse_run({"model": model, "data": {"path": str(token_folder)}})
    save_model(out, run, 0, seed=3)
    tokenizer = tokenizers.Tokenizer.from_file(str(token_folder / "tokenizer.json"))
    if request.param != "plain":
        tokenizer.add_special_tokens(["<s>"])
        template = tokenizers.processors.TemplateProcessing
        tokenizer.post_processor = template(single="<s> $A", special_tokens=[("<s>", 301)])
    tokenizer.save(str(out / "tokenizer.json"))
    return out


def a_task(folder: Path, name: str, records: list[dict[str, Any]], **settings: Any) -> Path:
    """Write a task of the harness with local documents; return its YAML file."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    task = {
        "task": f"local_{name}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **settings,
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(task))
    return file


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "pages.py").write_text(
        "from lm_eval.tasks.wikitext.preprocess_wikitext import *  # noqa\n"
    )
    metrics = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    wiki = a_task(
        folder,
        "wikitext",
        [{"page": page} for page in PAGES],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="FUNCTION pages.wikitext_detokenizer",
        process_results="FUNCTION pages.process_results",
        metric_list=[{"metric": name} for name in metrics],
    )
    text = re.sub("'?FUNCTION ([a-z_.]+)'?", r"!function \1", wiki.read_text())
    wiki.write_text(text)
    lambada = a_task(
        folder,
        "lambada",
        [{"text": text} for text in TEXTS],
        output_type="loglikelihood",
        doc_to_text="{{text.split(' ')[:-1]|join(' ')}}",
        doc_to_target="{{' '+text.split(' ')[-1]}}",
        metric_list=[
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
    )
    choices = a_task(
        folder,
        "choices",
        [{"query": q, "choices": c, "gold": g} for q, c, g in CHOICES],
        output_type="multiple_choice",
        doc_to_text="{{query}}",
        doc_to_choice="{{choices}}",
        doc_to_target="{{gold}}",
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )
    return {"wikitext": wiki, "lambada": lambada, "choices": choices}


@pytest.fixture(scope="module")
def theirs(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The harness's own model for the exported folder."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    export_run(run_dir, folder)
    names = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if "<s>" in (folder / "tokenizer.json").read_text():
        names["bos_token"] = "<s>"
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", batch_size=2, dtype="float32")


def of_the_harness(model: Any, file: Path) -> dict[str, float]:
    from gridformer.evaluate.harness import manager_of

    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[str(file)],
        bootstrap_iters=0,
        log_samples=False,
        task_manager=manager_of(str(file)),
    )
    (numbers,) = found["results"].values()
    return {
        key.partition(",")[0]: value
        for key, value in numbers.items()
        if key.endswith(",none") and "stderr" not in key
    }


@pytest.mark.parametrize("name", ["wikitext", "lambada", "choices"])
def test_the_adapter_gives_what_the_harness_gives(
    run_dir: Path, tasks: dict[str, Path], theirs: Any, name: str
) -> None:
    want = of_the_harness(theirs, tasks[name])
    loaded = load_model(run_dir, torch.device("cpu"))
    (found,) = measure(loaded, parse_tasks(f"lm-eval:{tasks[name]}"), Options()).values()
    assert want
    assert found == pytest.approx(want, rel=1e-3)


def test_our_own_tasks_give_what_the_harness_gives(
    run_dir: Path, tasks: dict[str, Path], theirs: Any, tmp_path: Path
) -> None:
    loaded = load_model(run_dir, torch.device("cpu"))
    pages, texts = tmp_path / "pages.jsonl", tmp_path / "texts.jsonl"
    pages.write_text("".join(json.dumps({"page": page}) + "\n" for page in PAGES))
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    asked = parse_tasks(f"wikitext:{pages},lambada:{texts}")
    wiki, lambada = measure(loaded, asked, Options()).values()
    want = of_the_harness(theirs, tasks["wikitext"])
    assert {key: wiki[key] for key in want} == pytest.approx(want, rel=1e-3)
    want = of_the_harness(theirs, tasks["lambada"])
    assert lambada["perplexity"] == pytest.approx(want["perplexity"], rel=1e-3)
    assert lambada["accuracy"] == want["acc"]


def test_texts_that_are_generated_are_those_of_the_harness(run_dir: Path, theirs: Any) -> None:
    from lm_eval.api.instance import Instance

    from gridformer.evaluate.harness import GridformerLM

    ours = GridformerLM(run_dir=str(run_dir), batch_size=2, device="cpu")
    settings: dict[str, Any] = {"until": ["of"], "max_gen_toks": 9, "do_sample": False}
    asked = [
        Instance("generate_until", {}, (text, settings), number)
        for number, text in enumerate(TEXTS)
    ]
    assert ours.generate_until(asked) == theirs.generate_until(asked)
