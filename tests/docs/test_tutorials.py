"""Tutorials work as typed: every block runs in its order, with less text and fewer steps."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import gridformer_here
from tests.support.fenced import ROOT, fences, run_files, words_of
from tests.support.reference.shared import transformers

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
TUTORIALS += [ROOT / "docs" / "how-to" / "chat.md"]


def run(command: str, steps: int = 2) -> str:
    # all of the standard library would take half a minute
    words = ["docs/" if word == "python-stdlib" else word for word in words_of(command)]
    assert words[0] == "gridformer", "a new kind of command: say in this file how it is tested"
    if words[1] == "train":
        words += [f"train.steps={steps}", "train.eval_batches=1"]
    done = gridformer_here(*words[1:])
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
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
