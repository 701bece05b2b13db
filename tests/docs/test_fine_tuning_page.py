"""The commands of docs/how-to/fine-tuning.md work as typed, on small data and small weights.

`import` reads folders that transformers wrote, and `prepare` reads files in the formats of the data
sets. Only the sizes of the models, the batches and the number of replicas are changed.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from gridformer.train.metrics import read_metrics
from tests.support.commands import gridformer_here
from tests.support.fenced import ROOT, fences, words_of
from tests.support.reference.folders import save
from tests.support.reference.shared import transformers
from tests.support.tasks import WRITE, words_tokenizer

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
def test_every_command_runs(tmp_path: Path) -> None:
    write_models(tmp_path)
    for name, write in WRITE.items():
        write(tmp_path / name.upper())
    vocabulary = json.loads((tmp_path / "SmolLM2-135M" / "config.json").read_text())["vocab_size"]
    ran = set()
    with contextlib.chdir(tmp_path):
        for command in COMMANDS:
            words = words_of(command)
            assert words[0] == "gridformer", "a new kind of command: say here how it is tested"
            if words[1] == "train":
                words += [*SIZES.split(), *SMALLER.split(), f"model.vocab_size={vocabulary}"]
                words += ["model.n_kv_heads=2", "model.ffn_size=80", "model.rope_theta=10000.0"] * (
                    "model=smollm2-135m" in words
                )
            done = gridformer_here(*words[1:])
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            if words[1] == "prepare" and "squad" in words:
                assert f"next: gridformer train {Path(words[-1]).name} " in done.stdout
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
