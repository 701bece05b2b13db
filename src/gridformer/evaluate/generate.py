"""Sampling from a checkpoint of any layout, on one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gridformer.comm import Axes
from gridformer.config import LayoutConfig
from gridformer.data import Tokenizer
from gridformer.errors import ConfigError
from gridformer.models import GPT2
from gridformer.models.blocks import KVCache
from gridformer.parallel import build_parallel
from gridformer.train import checkpoint
from gridformer.train.plan import load_for_inference


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temperature 0 is greedy; top_k 0 and top_p 1 leave all in."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.temperature < 0:
            problems.append(f"--temperature {self.temperature} is negative: use 0 for greedy")
        if self.top_k < 0:
            problems.append(f"--top-k {self.top_k} is negative: use 0 to keep all words")
        if not 0 < self.top_p <= 1:
            problems.append(f"--top-p {self.top_p} must be above 0 and at most 1")
        if problems:
            raise ConfigError(problems)


def load_model(run_dir: Path, device: torch.device) -> tuple[GPT2, Tokenizer]:
    """The model of a run's newest checkpoint (or of a checkpoint folder), whole on one device."""
    run, folder = load_for_inference(run_dir)
    root = folder if (folder / "tokenizer.json").exists() else folder.parents[1]
    tokenizer = Tokenizer.load(root / "tokenizer.json")
    model = build_parallel(
        run.model, LayoutConfig(), Axes(), run.train.seed, device, run.train.dtype
    )
    assert isinstance(model, GPT2)
    checkpoint.load(folder, model, None, Axes())
    return model.eval(), tokenizer


def stream(
    model: GPT2, tokenizer: Tokenizer, prompt: str, max_tokens: int, sampling: Sampling
) -> Iterator[str]:
    """Pieces of the continuation of `prompt`, as they are sampled.

    Ends after max_tokens tokens or at the end-of-text token. A character whose bytes span several
    tokens comes out when it is complete.
    """
    ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
    shown, done = "", []
    for token in sample(model, ids, max_tokens, sampling, tokenizer.vocab_size):
        if token == tokenizer.eos_id:
            break
        done.append(token)
        text = tokenizer.decode(done)
        if not text.endswith("�"):
            yield text[len(shown) :]
            shown = text
    rest = tokenizer.decode(done)[len(shown) :]
    if rest:
        yield rest


@torch.no_grad()
def sample(
    model: GPT2, ids: list[int], max_tokens: int, sampling: Sampling, vocab_size: int
) -> Iterator[int]:
    """Token ids that continue `ids`; only the first `vocab_size` words are ever chosen.

    Keys and values are cached. When the model's positions are used up, the second half of the
    context is read anew from position 0, so generation can go on for ever.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(sampling.seed)
    window = model.config.max_seq_len
    context = list(ids)[-window:]
    caches, start = _fresh(model), 0
    for _ in range(max_tokens):
        if len(context) > window:
            context = context[-(window // 2 or 1) :]
            caches, start = _fresh(model), 0
        tokens = torch.tensor([context[start:]], device=device)
        logits = model(tokens, caches, start)[0, -1, :vocab_size]
        start = len(context)
        token = int(choose(logits.float(), sampling, generator))
        context.append(token)
        yield token


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One word's index. Filters as in Holtzman et al. 2020: temperature, then top-k, then top-p."""
    if sampling.temperature == 0.0:
        return logits_V.argmax()
    logits_V = logits_V / sampling.temperature
    if 0 < sampling.top_k < len(logits_V):
        smallest = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < smallest, -torch.inf)
    probabilities, order = logits_V.softmax(-1).sort(descending=True)
    if sampling.top_p < 1.0:
        before = probabilities.cumsum(-1) - probabilities  # the first word always stays
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    return order[torch.multinomial(probabilities, 1, generator=generator)[0]]


def _fresh(model: GPT2) -> list[KVCache]:
    return [KVCache() for _ in range(model.config.n_layers)]
