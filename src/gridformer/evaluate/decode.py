"""Greedy search and beam search with encoder-decoder models, on one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gridformer.models import EncoderDecoder
from gridformer.models.blocks import KVCache
from gridformer.utils.errors import ConfigError


@dataclass(frozen=True)
class Search:
    """Settings of beam search. One beam is greedy search.

    A hypothesis of n tokens, its end included, has the score log p / n^length_penalty, so values
    above 0 favor longer hypotheses.

    Raises:
        ConfigError: beams or max_tokens is below 1.
    """

    beams: int = 4
    length_penalty: float = 1.0
    max_tokens: int = 128

    def __post_init__(self) -> None:
        problems = []
        if self.beams < 1:
            problems.append(f"--beams {self.beams} must be at least 1 (greedy search)")
        if self.max_tokens < 1:
            problems.append(f"--max-tokens {self.max_tokens} must be at least 1")
        if problems:
            raise ConfigError(problems)


@torch.no_grad()
def search(
    model: EncoderDecoder,
    source: Sequence[int],
    start: int,
    end: int,
    how: Search,
    never: Sequence[int] = (),
) -> list[int]:
    """Searches for the most likely target of a source.

    The algorithm is that of Wu et al. 2016 and of Hugging Face's generate. Among the 2k best
    continuations of k beams, those that end are kept as hypotheses if they are among the first k,
    and the best k others continue. The search ends when no beam can beat the worst of k hypotheses.

    Args:
        model: encoder-decoder model.
        source: token ids of the source.
        start: id with which a target starts.
        end: id with which a target ends.
        how: settings of the search.
        never: ids that a target may not contain.

    Returns:
        Token ids of the best target, without start and end.
    """
    device, k = next(model.parameters()).device, how.beams
    memory = model.encode({"source": torch.tensor([list(source)], device=device)})
    memory = memory.expand(k, -1, -1)
    caches = [KVCache() for _ in range(model.config.n_decoder_layers)]
    banned = torch.tensor(list(never), dtype=torch.int64, device=device)
    beams = torch.full((k, 1), start, device=device)
    scores = torch.full((k,), -torch.inf, device=device, dtype=torch.float64)
    scores[0] = 0.0  # all beams are equal at first, so only one of them counts
    done: list[tuple[float, list[int]]] = []
    for n in range(1, how.max_tokens + 1):
        logits = model.decode(beams[:, -1:], memory, caches=caches, start=n - 1)[:, -1]
        steps = logits.double().index_fill(1, banned, -torch.inf).log_softmax(-1)
        total = (scores[:, None] + steps).flatten()
        values, places = total.topk(min(2 * k, len(total)))
        rows, words = places // steps.shape[1], places % steps.shape[1]
        kept: list[int] = []
        for place, (value, word) in enumerate(zip(values.tolist(), words.tolist())):
            if word == end:
                if place < k:
                    found = beams[rows[place], 1:].tolist()
                    done.append((value / n**how.length_penalty, found))
            elif len(kept) < k:
                kept.append(place)
        done = sorted(done, key=lambda one: -one[0])[:k]
        chosen = torch.tensor(kept, device=device)
        scores, rows = values[chosen], rows[chosen]
        beams = torch.cat((beams[rows], words[chosen, None]), 1)
        if len(done) == k and done[-1][0] >= float(scores[0]) / n**how.length_penalty:
            break
        for cache in caches:
            cache.select(rows)
    else:
        n = how.max_tokens
        unfinished = zip(scores.tolist(), beams[:, 1:].tolist())
        done += [(score / n**how.length_penalty, found) for score, found in unfinished]
    return max(done, key=lambda one: one[0])[1]
