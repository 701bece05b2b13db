"""Generates text on one process with a checkpoint of any layout: continues, translates or fills."""

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
    """Settings for sampling the next token.

    temperature 0 is greedy. top_k 0 and top_p 1 keep all tokens.

    Raises:
        ConfigError: temperature or top_k is negative, or top_p is not in (0, 1].
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.temperature < 0:
            problems.append(
                f"--temperature {self.temperature} is negative: use 0 for greedy search"
            )
        if self.top_k < 0:
            problems.append(f"--top-k {self.top_k} is negative: use 0 to keep all tokens")
        if not 0 < self.top_p <= 1:
            problems.append(f"--top-p {self.top_p} must be above 0 and at most 1")
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class Trained:
    """The model of a run, whole on one device, with its config and tokenizer."""

    run: RunConfig
    model: Model
    tokenizer: Tokenizer

    @property
    def special(self) -> SpecialIds:
        """The ids of the model's special tokens."""
        return special_ids(self.run, self.tokenizer)


def load_model(run_dir: Path, device: torch.device) -> Trained:
    """Loads the model of the newest checkpoint of a run.

    Args:
        run_dir: run directory, or one of its checkpoints.
        device: device for the model.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
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
    """Checks that a model uses all options that were given.

    Args:
        model: config of the model.
        given: names of fields of `Sampling` and `Search`.

    Raises:
        ConfigError: the family of the model does not use one of the options.
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
                f"{option} is for gpt2, which samples tokens; this model is a {family}: "
                f"{instead if searches else 'leave it out'}"
            )
        elif name not in of_sampling and not searches:
            instead = "use --temperature, --top-k and --top-p, or leave it out"
            problems.append(
                f"{option} is for t5 and transformer, which use beam search; this model is a "
                f"{family}: {instead if samples else 'leave it out'}"
            )
    if problems:
        raise ConfigError(problems)


def answer(trained: Trained, prompt: str, sampling: Sampling, how: Search) -> Iterator[str]:
    """Yields the output of a model for a prompt in pieces of text.

    For gpt2 it is the prompt and its continuation. For bert, and for t5 trained on spans, it is the
    prompt with its blanks filled in. For t5 and transformer trained on pairs, it is the second text
    of the pair.

    Args:
        trained: the model.
        prompt: text; ___ marks a blank.
        sampling: settings for gpt2.
        how: settings for t5 and transformer. `max_tokens` also applies to gpt2.

    Raises:
        UserError: blanks are missing, or the prompt is too long; see `fill_words` and `fill_spans`.
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
    """Generates the second text of a pair whose first text is `text`, with beam search."""
    source = [*tokenizer.encode(text), special.eos]
    never = special.never(model.config.vocab_size)
    return tokenizer.decode(search(model, source, special.start, special.eos, how, never))


def _filled(prompt: str, words: list[str]) -> str:
    parts = parts_of(prompt)
    return parts[0] + "".join(word + part for word, part in zip(words, parts[1:]))


def stream(
    model: GPT2, tokenizer: Tokenizer, prompt: str, max_tokens: int, sampling: Sampling
) -> Iterator[str]:
    """Yields the continuation of `prompt` in pieces of text while it is sampled.

    It ends after max_tokens tokens or at the end-of-text token. A character whose bytes span
    several tokens is yielded when it is complete.
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
    """Yields up to max_tokens token ids that continue `ids`.

    Keys and values are cached. When the positions of the model are used up, the second half of the
    context is read again from position 0, so there is no limit to the length.

    Args:
        model: GPT-2 model.
        ids: token ids of the prompt, at least one.
        max_tokens: number of tokens.
        sampling: settings.
        vocab_size: only ids below this are chosen.
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
    """Samples a token: applies temperature, then top-k, then top-p (Holtzman et al. 2020).

    Args:
        logits_V: logits [V].
        sampling: settings.
        generator: random generator on the device of the logits.

    Returns:
        The id of the token, int64 [].
    """
    if sampling.temperature == 0.0:
        return logits_V.argmax()
    logits_V = logits_V / sampling.temperature
    if 0 < sampling.top_k < len(logits_V):
        smallest = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < smallest, -torch.inf)
    probabilities, order = logits_V.softmax(-1).sort(descending=True)
    if sampling.top_p < 1.0:
        before = probabilities.cumsum(-1) - probabilities  # the first token is always kept
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    return order[torch.multinomial(probabilities, 1, generator=generator)[0]]


def _fresh(model: GPT2) -> list[KVCache]:
    return [KVCache() for _ in range(model.config.n_layers)]
