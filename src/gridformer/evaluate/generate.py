"""Text from a checkpoint of any layout, on one process: continued, translated, or filled in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from gridformer.checkpoint import checkpoint
from gridformer.config import LayoutConfig, ModelConfig, RunConfig
from gridformer.data import SpecialIds, Tokenizer, special_ids
from gridformer.evaluate.decode import Search, search
from gridformer.evaluate.fill import fill_spans, fill_words, parts_of
from gridformer.evaluate.loading import load_for_inference
from gridformer.mesh import Axes
from gridformer.models import BERT, GPT2, EncoderDecoder, Model
from gridformer.models.blocks import KVCache
from gridformer.parallel import build_parallel
from gridformer.utils.errors import ConfigError


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


@dataclass(frozen=True)
class Trained:
    """A run's model, whole on one device, with what is needed to talk to it."""

    run: RunConfig
    model: Model
    tokenizer: Tokenizer

    @property
    def special(self) -> SpecialIds:
        return special_ids(self.run, self.tokenizer)


def load_model(run_dir: Path, device: torch.device) -> Trained:
    """The model of a run's newest checkpoint (or of a checkpoint folder)."""
    run, folder = load_for_inference(run_dir)
    root = folder if (folder / "tokenizer.json").exists() else folder.parents[1]
    tokenizer = Tokenizer.load(root / "tokenizer.json")
    model = build_parallel(
        run.model,
        LayoutConfig(),
        Axes(),
        run.train.seed,
        device,
        run.train.dtype,
        filled=False,
    )
    checkpoint.load(folder, model, None, Axes())
    return Trained(run, model.eval(), tokenizer)


def check_options(model: ModelConfig, given: Sequence[str]) -> None:
    """Raise ConfigError where an option was given that this model does not look at.

    Args:
        given: names of fields of `Sampling` and `Search`.
    """
    family = model.family
    samples, searches = family == "gpt2", model.two_stacks
    of_sampling = {field.name for field in fields(Sampling)}
    problems = []
    for name in given:
        option = f"--{name.replace('_', '-')}"
        if name in of_sampling and not samples:
            instead = "use --beams and --length-penalty, or leave it out"
            problems.append(
                f"{option} is for gpt2, which draws its words; this model is a {family}: "
                f"{instead if searches else 'leave it out'}"
            )
        elif name not in of_sampling and not searches:
            instead = "use --temperature, --top-k and --top-p, or leave it out"
            problems.append(
                f"{option} is for t5 and transformer, which search with beams; this model is a "
                f"{family}: {instead if samples else 'leave it out'}"
            )
    if problems:
        raise ConfigError(problems)


def answer(trained: Trained, prompt: str, sampling: Sampling, how: Search) -> Iterator[str]:
    """What a model makes of a prompt, piece by piece, as its family has learned to.

    gpt2: the prompt and its continuation. bert, and t5 of spans: the prompt with its blanks filled
    in. t5 and transformer of pairs: the other text.
    """
    model, tokenizer = trained.model, trained.tokenizer
    if isinstance(model, GPT2):
        yield prompt
        yield from stream(model, tokenizer, prompt, how.max_tokens, sampling)
    elif isinstance(model, BERT):
        yield _filled(prompt, fill_words(model, tokenizer, trained.special, prompt))
    elif isinstance(model, EncoderDecoder) and trained.run.task == "spans":
        yield _filled(prompt, fill_spans(model, tokenizer, trained.special, prompt, how))
    elif isinstance(model, EncoderDecoder):
        yield translate(model, tokenizer, trained.special, prompt, how)


def translate(
    model: EncoderDecoder, tokenizer: Tokenizer, special: SpecialIds, text: str, how: Search
) -> str:
    """The second text of a pair whose first is `text`."""
    source = [*tokenizer.encode(text), special.eos]
    never = special.never(model.config.vocab_size)
    return tokenizer.decode(search(model, source, special.start, special.eos, how, never))


def _filled(prompt: str, words: list[str]) -> str:
    parts = parts_of(prompt)
    return parts[0] + "".join(word + part for word, part in zip(words, parts[1:]))


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
