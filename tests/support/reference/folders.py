"""Tiny folders of Hugging Face, and what models compute from them."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gridformer.evaluate.loading import load_model
from gridformer.models import Model
from tests.support.reference.shared import V, tokens_of, transformers


def save(model: Any, folder: Path, sharded: bool = False) -> Path:
    """Write a model as their library does, in one file or in several small ones."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    model.save_pretrained(folder, max_shard_size="40KB" if sharded else "5GB")
    return folder


def tokenizer() -> Any:
    """Return a tokenizer with an end-of-text token and fewer words than the models have."""
    import tokenizers

    words = {"<|endoftext|>": 0, "a": 1, "b": 2}
    found = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    found.add_special_tokens(["<|endoftext|>"])
    return found


def opened_by_them(folder: Path) -> Any:
    """Open a folder with the class that its config.json names, as Auto classes do."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder).eval()


def ours(run_dir: Path) -> Model:
    return load_model(run_dir, torch.device("cpu")).model


def our_logits(model: Model) -> Tensor:
    with torch.no_grad():
        return model.logits(_batch(model))["tokens"]


def their_logits(theirs: Any, model: Model) -> Tensor:
    batch = _batch(model)
    if "source" in batch:
        given = {"input_ids": batch["source"], "decoder_input_ids": batch["tokens"]}
    else:
        given = {"input_ids": batch["tokens"]}
    with torch.no_grad():
        out = theirs(**given)
    found: Tensor = out.logits if hasattr(out, "logits") else out.prediction_logits
    return found


def _batch(model: Model) -> dict[str, Tensor]:
    batch = {"tokens": tokens_of(V, 2, 9)}
    if model.config.two_stacks:
        batch["source"] = tokens_of(V, 2, 12, seed=2)
    return batch
