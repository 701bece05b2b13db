"""Samples the tokens that continue texts, many at a time, on any layout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gridformer import comm
from gridformer.evaluate.decoding import Decoder
from gridformer.evaluate.loading import Trained
from gridformer.utils import rng
from gridformer.utils.errors import ConfigError, UserError
from gridformer.utils.units import counted

MOST_SEED = 2**62 - 1  # `rng` reads integers up to this one


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling the next token.

    temperature 0 is greedy. top_k 0 and top_p 1 keep all tokens.

    Raises:
        ConfigError: `temperature`, `top_k` or `seed` is negative, `top_p` is not in (0, 1], or
            `seed` is too large.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            f"--temperature {self.temperature} is negative: use 0 for greedy search": (
                self.temperature >= 0
            ),
            f"--top-k {self.top_k} is negative: use 0 to keep all tokens": self.top_k >= 0,
            f"--top-p {self.top_p} must be above 0 and at most 1": 0 < self.top_p <= 1,
            f"--seed {self.seed} must be from 0 to {MOST_SEED}": 0 <= self.seed <= MOST_SEED,
        }
        if problems := [problem for problem, well in checks.items() if not well]:
            raise ConfigError(*problems)


@dataclass
class Speed:
    """Tokens that were read and generated, and the seconds that it took."""

    prompt_tokens: int = 0  # of prompts, read in the first pass of each batch
    prompt_s: float = 0.0  # of these passes
    new_tokens: int = 0
    new_s: float = 0.0  # of all other passes

    def __str__(self) -> str:
        read = f"{counted(self.prompt_tokens, 'token')} of prompts"
        new = counted(self.new_tokens, "new token")
        if self.prompt_s:
            read += f" at {self.prompt_tokens / self.prompt_s:,.0f} tokens/s"
        if self.new_s:  # none with --max-tokens 1, because the first pass gives one token
            new += f" at {self.new_tokens / self.new_s:,.0f} tokens/s"
        return f"{read}, {new}"


@dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    ids: Sequence[int]  # at least one
    max_tokens: int
    seed: int


@torch.no_grad()
def continue_texts(
    trained: Trained,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    vocab_size: int,
    ended: Callable[[int, int], bool] = lambda text, token: False,
    speed: Speed | None = None,
) -> Iterator[list[int | None]]:
    """Yields the next token of each text, until all of them have ended.

    All processes of the layout call it together, with the same arguments, inside `Trained.in_use`,
    and get the same tokens. These depend on neither the layout nor the other prompts: the texts are
    at the same position at all times. Those with shorter prompts are continued while the rest of
    the longer ones is read, so prompts of about equal length take the least time. When the
    positions of the model are used up, the second half of the context is read again from position
    0, so there is no limit to the length.

    Args:
        trained: A model that continues texts.
        prompts: The prompts.
        sampling: The settings; each prompt has its own seed.
        vocab_size: Only ids below this are chosen.
        ended: Whether a new token ends its text; it is called with the number of the text and the
            token, on every process.
        speed: Counts tokens and seconds.

    Yields:
        For each prompt its next token; None if there was none in this pass.
    """
    decoder, device, speed = Decoder(trained, len(prompts)), trained.device, speed or Speed()
    n_rows, window = decoder.n_rows, trained.model.config.max_seq_len
    known = [list(prompt.ids)[-window:] for prompt in prompts]
    left = [prompt.max_tokens for prompt in prompts]
    seeds = [*(prompt.seed for prompt in prompts), *[0] * (n_rows - len(prompts))]
    counts = [0] * n_rows
    read, first = 0, True
    while running := [i for i, n in enumerate(left) if n > 0]:
        began = time.perf_counter()
        # The longest prefix that every text which goes on has.
        n = min(len(known[i]) for i in running)
        if n > window:  # then all of them have n tokens
            known = [text[-(window // 2 or 1) :] for text in known]
            n, read = len(known[running[0]]), 0
            decoder.reset()
        # A text that has ended is filled up with its last token.
        rows = [[*text[:n], *[text[-1]] * (n - len(text))] for text in known]
        rows += [rows[running[0]]] * (n_rows - len(rows))
        logits = decoder.read(torch.tensor([row[read:n] for row in rows]))
        read = n
        chosen = torch.zeros(n_rows, dtype=torch.int64, device=device)
        if logits is not None and decoder.speaks:
            places = [torch.tensor(x[decoder.rows], device=device) for x in (seeds, counts)]
            drawn = uniform(*places)
            chosen[decoder.rows] = sample_tokens(logits[:, :vocab_size], sampling, drawn)
        tokens = comm.all_reduce(chosen, decoder.axes.world, label="generate").tolist()
        if any(tokens[i] < 0 for i in running):
            raise UserError(
                "the model computes NaN or infinite values: use another --dtype, such as float32, "
                "or another checkpoint"
            )
        new: list[int | None] = [None] * len(prompts)
        for i in running:
            if len(known[i]) > n:
                continue  # more of its prompt is to be read
            new[i] = tokens[i]
            known[i].append(tokens[i])
            counts[i] += 1
            left[i] = 0 if ended(i, tokens[i]) else left[i] - 1
        speed.new_tokens += sum(token is not None for token in new)
        if first:
            speed.prompt_tokens += n * len(prompts)
            speed.prompt_s += time.perf_counter() - began
        else:
            speed.new_s += time.perf_counter() - began
        first = False
        yield new


def uniform(seeds_B: Tensor, places_B: Tensor) -> Tensor:
    """Returns one random number in [0, 1) for each pair of a seed and a place, float64 [b].

    They are the same on every device and in every batch.

    Args:
        seeds_B: Seeds, int64 [b].
        places_B: How many tokens of the text were chosen before, int64 [b].
    """
    words = rng.bits(
        rng.key("generate"),
        rng.hash_indices(seeds_B, places_B),
        torch.arange(2, device=seeds_B.device),
    ).double()
    return (words[:, 0] + words[:, 1] / 2**32) / 2**32


def sample_tokens(logits_BV: Tensor, sampling: Sampling, uniform_B: Tensor) -> Tensor:
    """Samples tokens: applies temperature, then top-k, then top-p (Holtzman et al. 2020).

    Args:
        logits_BV: Logits [b, V].
        sampling: The settings.
        uniform_B: A random number in [0, 1) for each row, float64 [b].

    Returns:
        The ids of the tokens, int64 [b]; -1 where no logit is the largest, because some are NaN or
        infinite.
    """
    largest_B1 = logits_BV.amax(-1, keepdim=True)
    if sampling.temperature == 0.0:
        chosen_B = logits_BV.argmax(-1)
    else:
        # The largest becomes 0, so that no temperature makes it infinite.
        shifted_BV = (logits_BV.double() - largest_B1.double()) / sampling.temperature
        chosen_B = _sampled(shifted_BV, sampling, uniform_B)
    return torch.where(largest_B1.squeeze(-1).isfinite(), chosen_B, -1)


def _sampled(logits_BV: Tensor, sampling: Sampling, uniform_B: Tensor) -> Tensor:
    if 0 < sampling.top_k < logits_BV.shape[1]:
        smallest = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest, -torch.inf)
    probabilities, order = logits_BV.softmax(-1).sort(descending=True, stable=True)
    if sampling.top_p < 1.0:
        before = probabilities.cumsum(-1) - probabilities  # the first token is always kept
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    up_to = probabilities.cumsum(-1)
    place = (up_to <= uniform_B[:, None] * up_to[:, -1:]).sum(-1, keepdim=True)
    last = (probabilities > 0).sum(-1, keepdim=True) - 1  # rounding must not lead beyond it
    return order.gather(1, torch.minimum(place, last).clamp_min(0)).squeeze(1)
