"""Continues texts, many at a time, on any layout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from gridformer import comm
from gridformer.evaluate.decoding import Decoder, row_parts
from gridformer.evaluate.loading import Trained
from gridformer.evaluate.sampling import Sampling, sample_tokens, uniform
from gridformer.utils.errors import UserError

Ended = Callable[[int, int], bool]


@dataclass
class Speed:
    """Tokens that were read and generated, and the seconds that it took.

    Attributes:
        prompt_tokens: Tokens of prompts that were read in the first pass of each batch.
        prompt_s: Seconds of these passes.
        new_tokens: Generated tokens.
        new_s: Seconds of all other passes.
    """

    prompt_tokens: int = 0
    prompt_s: float = 0.0
    new_tokens: int = 0
    new_s: float = 0.0

    def __str__(self) -> str:
        read, new = f"{self.prompt_tokens} tokens of prompts", f"{self.new_tokens} new tokens"
        if self.prompt_s:
            read += f" at {self.prompt_tokens / self.prompt_s:,.0f} tokens/s"
        if self.new_s:  # none with --max-tokens 1, because the first pass gives one token
            new += f" at {self.new_tokens / self.new_s:,.0f} tokens/s"
        return f"{read}, {new}"


@dataclass(frozen=True)
class Prompt:
    """A text to continue.

    Attributes:
        ids: Its tokens, at least one.
        max_tokens: The largest number of tokens to add.
        seed: The seed of its random numbers.
    """

    ids: Sequence[int]
    max_tokens: int
    seed: int


@torch.no_grad()
def continue_texts(
    trained: Trained,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    vocab_size: int,
    ended: Ended = lambda text, token: False,
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
    parts = row_parts(trained)
    n_rows = -(-len(prompts) // parts) * parts
    decoder, device = Decoder(trained, n_rows), trained.device
    window = trained.model.config.max_seq_len
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
        rows = [_filled(text, n) for text in known]
        rows += [rows[running[0]]] * (n_rows - len(rows))
        logits = decoder.read(torch.tensor([row[read:n] for row in rows]))
        read = n
        chosen = torch.zeros(n_rows, dtype=torch.int64, device=device)
        if logits is not None and decoder.speaks:
            places = [torch.tensor(x[decoder.rows], device=device) for x in (seeds, counts)]
            drawn = uniform(*places)
            chosen[decoder.rows] = sample_tokens(logits[:, :vocab_size], sampling, drawn)
        words = comm.all_reduce(chosen, decoder.axes.world, label="generate").tolist()
        if any(words[i] < 0 for i in running):
            raise UserError(
                "the model computes NaN or infinite values: use another --dtype, such as float32, "
                "or another checkpoint"
            )
        found: list[int | None] = [None] * len(prompts)
        for i in running:
            if len(known[i]) > n:
                continue  # more of its prompt is to be read
            found[i] = words[i]
            known[i].append(words[i])
            counts[i] += 1
            left[i] = 0 if ended(i, words[i]) else left[i] - 1
        if speed is not None:
            seconds, n_new = time.perf_counter() - began, sum(w is not None for w in found)
            speed.new_tokens += n_new
            if first:
                speed.prompt_tokens += n * len(prompts)
                speed.prompt_s += seconds
            else:
                speed.new_s += seconds
        first = False
        yield found


def _filled(text: list[int], n: int) -> list[int]:
    """Returns the first n tokens of a text; one that has ended is filled up with its last one."""
    return [*text[:n], *[text[-1]] * (n - len(text))]
