"""Tutorials work as typed: every block runs in its order, with less text and fewer steps.

So do the commands of docs/how-to/fine-tuning.md, on small data and small weights. `import` reads
folders that transformers wrote, and `prepare` reads files in the formats of the data sets.
"""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gridformer.train.metrics import read_metrics
from tests.support.commands import gridformer_here
from tests.support.fenced import ROOT, fences, run_files, words_of
from tests.support.reference.folders import save
from tests.support.reference.shared import transformers
from tests.support.tasks import WRITE, words_tokenizer

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
TUTORIALS += [ROOT / "docs" / "quick-start.md", ROOT / "docs" / "how-to" / "chat.md"]


def run(command: str, steps: int = 2) -> str:
    # all of the standard library would take half a minute
    words = ["docs/" if word == "python-stdlib" else word for word in words_of(command)]
    if words[1] == "train":
        words += [f"train.steps={steps}", "train.eval_batches=1"]
    return output_of(words)


def output_of(words: list[str]) -> str:
    assert words[0] == "gridformer", "a new kind of command: say in this file how it is tested"
    done = gridformer_here(*words[1:])
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_every_block_runs(page: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    named = {fence.line: name for name, fence in run_files(page)}
    names: dict[str, Any] = {}
    steps = 0
    with contextlib.chdir(tmp_path):
        for fence in fences(page):
            if fence.language == "bash":
                for command in fence.lines:
                    steps += 2 * command.startswith("gridformer train")  # the next run may resume
                    run(command, steps)
            elif not fence.language:
                continue  # needs the reader's own files
            elif fence.language == "python":
                exec(fence.text, names)
            else:
                assert fence.language == "yaml", "a block of a new kind"
                Path(named[fence.line]).write_text(fence.text)


@pytest.mark.full
def test_files_of_an_imported_model_come_back_after_training(tmp_path: Path) -> None:
    """The chat template and the ids of tokens, if the data have the model's tokenizer."""
    with contextlib.chdir(tmp_path):
        Path("text.txt").write_text("Some words, and some more words.\n" * 200)
        run("gridformer prepare text.txt --vocab-size 300 --out data")
        vocabulary = json.loads(Path("data/index.json").read_text())["vocab_size"]
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
        config = transformers.GPT2Config(vocab_size=vocabulary, bos_token_id=3, **sizes)
        transformers.GPT2LMHeadModel(config).save_pretrained("theirs")
        shutil.copy("data/tokenizer.json", "theirs")
        Path("theirs/chat_template.jinja").write_text("{{ messages }}")
        run("gridformer import theirs --out imported")
        model = "model.n_layers=1 model.hidden_size=8 model.n_heads=2 model.max_seq_len=16"
        Path("run.yaml").write_text("data: {path: data}\ntrain: {init_from: imported}\n")
        run(f"gridformer train run.yaml {model} --out trained")
        run("gridformer export trained --out back")
        assert Path("back/chat_template.jinja").read_text() == "{{ messages }}"
        assert json.loads(Path("back/config.json").read_text())["bos_token_id"] == 3


PAGE = ROOT / "docs" / "how-to" / "fine-tuning.md"
COMMANDS = [line for fence in fences(PAGE) if not fence.language for line in fence.lines]
SIZES = "model.n_layers=1 model.hidden_size=48 model.n_heads=4 model.max_seq_len=512"
SMALLER = "train.epochs=1 train.global_batch=8 train.eval_every=100 layout.dp=1 train.device=cpu"


def write_models(folder: Path) -> None:
    """Write the two folders of Hugging Face that the page names, with tiny models."""
    tokenizer = words_tokenizer()
    n = tokenizer.vocab_size + 4  # BERT's special tokens
    sizes: dict[str, Any] = {"vocab_size": n, "hidden_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 512}
    bert = transformers.BertForPreTraining(
        transformers.BertConfig(**sizes, intermediate_size=192, layer_norm_eps=1e-12)
    )
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **sizes,
            num_key_value_heads=2,
            intermediate_size=80,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    )
    for name, model in (("bert-base-uncased", bert), ("SmolLM2-135M", llama)):
        tokenizer.save(save(model, folder / name) / "tokenizer.json")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_command_of_the_page_on_fine_tuning_runs(tmp_path: Path) -> None:
    write_models(tmp_path)
    for name, write in WRITE.items():
        write(tmp_path / name.upper())
    vocabulary = json.loads((tmp_path / "SmolLM2-135M" / "config.json").read_text())["vocab_size"]
    ran = set()
    with contextlib.chdir(tmp_path):
        for command in COMMANDS:
            words = words_of(command)
            if words[1] == "train":
                words += [*SIZES.split(), *SMALLER.split(), f"model.vocab_size={vocabulary}"]
                words += ["model.n_kv_heads=2", "model.ffn_size=80", "model.rope_theta=10000.0"] * (
                    "model=smollm2-135m" in words
                )
            printed = output_of(words)
            if words[1] == "prepare" and "squad" in words:
                assert f"next: gridformer train {Path(words[-1]).name} " in printed
            ran.add(words[1])
        for run in (tmp_path / "runs").iterdir():
            last = read_metrics(run)[-1:]
            if last:  # an imported model has not been trained
                assert any(key.startswith("val_") for key in last[0]), run
        classes = {
            json.loads(path.read_text())["architectures"][0]
            for path in (tmp_path / "exported").rglob("config.json")
        }
    assert ran == {"import", "prepare", "train", "evaluate", "export"}
    assert classes == {"BertForSequenceClassification", "LlamaForSequenceClassification"}
