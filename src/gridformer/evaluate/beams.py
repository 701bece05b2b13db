"""Greedy search and beam search with encoder-decoder models, on any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gridformer import comm
from gridformer.data import SpecialIds
from gridformer.evaluate.decoding import Decoder, row_parts, whole_logits
from gridformer.evaluate.loading import Trained
from gridformer.evaluate.scoring import in_batches
from gridformer.utils.batch import Batch
from gridformer.utils.errors import ConfigError, UserError

_MOST_PENALTY = 10.0  # so that its powers of numbers of tokens are finite


@dataclass(frozen=True)
class BeamSearch:
    """Settings of beam search. One beam is greedy search.

    A hypothesis of n tokens, its end included, has the score log p / n^length_penalty, so values
    above 0 favor longer hypotheses.

    Raises:
        ConfigError: `beams` or `max_tokens` is below 1, or `length_penalty` not in [-10, 10].
    """

    beams: int = 4
    length_penalty: float = 1.0
    max_tokens: int = 128

    def __post_init__(self) -> None:
        problems = []
        if self.beams < 1:
            problems.append(f"--beams {self.beams} must be at least 1 (greedy search)")
        if not abs(self.length_penalty) <= _MOST_PENALTY:  # NaN, too
            problems.append(
                f"--length-penalty {self.length_penalty:g} must be from -{_MOST_PENALTY:g} to "
                f"{_MOST_PENALTY:g}"
            )
        if self.max_tokens < 1:
            problems.append(f"--max-tokens {self.max_tokens} must be at least 1")
        if problems:
            raise ConfigError(*problems)


@torch.no_grad()
def beam_search(
    trained: Trained,
    sources: Sequence[Sequence[int]],
    start: int,
    end: int,
    how: BeamSearch,
    never: Sequence[int] = (),
) -> list[list[int]]:
    """Searches for the most likely target of each source.

    All processes of the layout call it together, inside `Trained.in_use`, and get the same targets.
    The beams of a source are on one process.

    Args:
        trained: Encoder-decoder model.
        sources: Token ids of the sources.
        start: Id with which a target starts.
        end: Id with which a target ends.
        how: Settings of the search.
        never: Ids that a target may not contain.

    Returns:
        Token ids of the best target of each source, without start and end.
    """
    parts, k = row_parts(trained), how.beams
    n = -(-len(sources) // parts) * parts
    decoder = Decoder(trained, n, [*sources, *[sources[0]] * (n - len(sources))])
    world, device = trained.axes.world, trained.device
    searches = [Beams(start, end, how, never, device) for _ in range(n)]
    tokens = torch.full((n, 1), start)
    for step in range(how.max_tokens):
        logits = decoder.read(tokens)
        if step == 0:
            decoder.repeat(k)
        # The text that takes each place, its next token, and whether its search goes on.
        said = torch.zeros(3, n * k, dtype=torch.int64, device=device)
        if logits is not None and decoder.speaks:
            first = decoder.rows.start
            for row in range(first, decoder.rows.stop, k):
                block = slice(row, row + k)
                of = searches[row // k]
                here = logits[(row - first) // k] if step == 0 else logits[row - first :][:k]
                order, words = of.step(here.expand(k, -1))
                said[0, block], said[1, block], said[2, block] = order + row, words, not of.ended
        order, words, running = comm.all_reduce(said, world, label="beams").cpu()
        if not running.any():
            break
        decoder.select(order)
        tokens = words[:, None]
    found = torch.full((n, how.max_tokens + 1), 0, dtype=torch.int64, device=device)
    if decoder.speaks:
        for row in range(decoder.rows.start // k, decoder.rows.stop // k):
            best = searches[row].best()
            found[row, 0] = len(best)
            found[row, 1 : len(best) + 1] = torch.tensor(best, dtype=torch.int64, device=device)
    rows = comm.all_reduce(found, world, label="beams").tolist()
    return [row[1 : row[0] + 1] for row in rows[: len(sources)]]


def search_in_batches(
    trained: Trained,
    special: SpecialIds,
    sources: Sequence[Sequence[int]],
    how: BeamSearch,
    batch_size: int = 32,
    sentinels: bool = False,
) -> list[list[int]]:
    """Searches for the targets of sources, of which some go through the model together.

    Args:
        trained: Encoder-decoder model. All processes call it together and get the same targets.
        special: Ids of its special tokens.
        sources: Token ids of the sources.
        how: Settings of the search.
        batch_size: Sources at a time. Those of about equal length go together, since their searches
            end at about the same time.
        sentinels: Whether targets may contain the sentinels of blanks.
    """
    targets: list[list[int]] = [[]] * len(sources)
    never = {*special.never(trained.model.config.vocab_size)}
    banned = sorted(never - {*special.sentinels} if sentinels else never)
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    with trained.in_use():
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            some = [sources[i] for i in batch]
            found = beam_search(trained, some, special.start, special.eos, how, banned)
            for i, ids in zip(batch, found):
                targets[i] = ids
    return targets


def translate(
    trained: Trained,
    special: SpecialIds,
    texts: Sequence[str],
    how: BeamSearch,
    batch_size: int = 32,
) -> list[str]:
    """Generates the second text of each pair whose first text is given.

    Args:
        trained, special, how, batch_size: See `search_in_batches`.
        texts: The first text of each pair.
    """
    tokenizer = trained.tokenizer
    sources = [[*ids, special.eos] for ids in tokenizer.encode_batch(texts)]
    targets = search_in_batches(trained, special, sources, how, batch_size)
    return [tokenizer.decode(ids) for ids in targets]


class Beams:
    """The beam search for one source.

    The algorithm is that of Wu et al. 2016 and of Hugging Face's generate. Among the 2k best
    continuations of k beams, those that end are kept as hypotheses if they are among the first k,
    and the best k others continue. The search ends when no beam can beat the worst of k hypotheses.

    Args:
        start, end, how, never: See `search`.
        device: Where logits are.

    Attributes:
        ended: Whether the search has ended.
    """

    def __init__(
        self, start: int, end: int, how: BeamSearch, never: Sequence[int], device: torch.device
    ) -> None:
        self.end, self.how, self.ended = end, how, False
        self.banned = torch.tensor(list(never), dtype=torch.int64, device=device)
        self.beams = torch.full((how.beams, 1), start, device=device)
        self.scores = torch.full((how.beams,), -torch.inf, device=device, dtype=torch.float64)
        self.scores[0] = 0.0  # all beams are equal at first, so only one of them counts
        self.done: list[tuple[float, list[int]]] = []

    def step(self, logits_KV: Tensor) -> tuple[Tensor, Tensor]:
        """Extends the beams by one token.

        Args:
            logits_KV: Logits after each beam [k, v].

        Returns:
            For each beam the number of the one that it continues, and its new token, int64 [k]. If
            the search has ended, nothing changes.
        """
        k, n = self.how.beams, self.beams.shape[1]
        if self.ended:
            return torch.arange(k, device=logits_KV.device), self.beams[:, -1]
        steps = logits_KV.double().index_fill(1, self.banned, -torch.inf).log_softmax(-1)
        total = (self.scores[:, None] + steps).flatten()
        values, places = total.topk(min(2 * k, len(total)))
        rows, words = places // steps.shape[1], places % steps.shape[1]
        kept: list[int] = []
        for place, (value, word) in enumerate(zip(values.tolist(), words.tolist())):
            if word == self.end:
                if place < k:
                    self._keep(value, n, self.beams[rows[place], 1:].tolist())
            elif len(kept) < k:
                kept.append(place)
        self.done = sorted(self.done, key=lambda one: -one[0])[:k]
        chosen = torch.tensor(kept, device=logits_KV.device)
        self.scores, rows = values[chosen], rows[chosen]
        self.beams = torch.cat((self.beams[rows], words[chosen, None]), 1)
        best = float(self.scores[0]) / n**self.how.length_penalty
        if len(self.done) == k and self.done[-1][0] >= best:
            self.ended = True
        elif n == self.how.max_tokens:
            for value, beam in zip(self.scores.tolist(), self.beams[:, 1:].tolist()):
                self._keep(value, n, beam)
            self.ended = True
        return rows, words[chosen]

    def best(self) -> list[int]:
        """Returns the best hypothesis of a search that has ended."""
        return max(self.done, key=lambda one: one[0])[1]

    def _keep(self, score: float, n: int, ids: list[int]) -> None:
        self.done.append((score / n**self.how.length_penalty, ids))


BLANK = "___"  # three underscores


def parts_of(text: str) -> list[str]:
    """Splits a text at its blanks.

    Raises:
        UserError: The text has no blank.
    """
    parts = text.split(BLANK)
    if len(parts) == 1:
        raise UserError(
            f"the prompt has no blank: write {BLANK} where text is to be filled in, for example "
            f'--prompt "import {BLANK}"'
        )
    return parts


def fill_words(trained: Trained, special: SpecialIds, text: str) -> list[str]:
    """Predicts the most likely token for each blank, for all blanks in one pass.

    All processes call it together and get the same words.

    Args:
        trained: BERT model.
        special: Ids of its special tokens.
        text: Prompt with blanks.

    Returns:
        One text per blank.

    Raises:
        UserError: The text has no blank, or more tokens than the model reads.
    """
    assert special.cls is not None
    assert special.mask is not None
    assert special.sep is not None
    model, tokenizer = trained.model, trained.tokenizer
    ids, blanks = [special.cls], []
    for number, part in enumerate(parts_of(text)):
        if number:
            blanks.append(len(ids))
            ids.append(special.mask)
        ids += tokenizer.encode(part)
    ids.append(special.sep)
    if len(ids) > model.config.max_seq_len:
        raise UserError(
            f"the prompt takes {len(ids)} tokens, and the model reads "
            f"{model.config.max_seq_len}: shorten the prompt"
        )

    def batch_of(numbers: Sequence[int], multiple: int) -> Batch:
        padding = -len(ids) % multiple
        row = torch.tensor([[*ids, *[special.pad] * padding]])
        valid = torch.arange(len(ids) + padding) < len(ids)
        return {"tokens": row.repeat(len(numbers), 1), "valid": valid.repeat(len(numbers), 1)}

    def words(hidden: Tensor, batch: Batch) -> Tensor | None:
        logits = whole_logits(model, hidden)
        if logits is None:
            return None
        logits = logits[:, blanks, : special.ordinary_size]
        logits[..., sorted(special.not_words)] = -torch.inf
        return logits.argmax(-1)

    found = in_batches(trained, [0], 1, batch_of, words, len(blanks))[0]
    return [tokenizer.decode([int(word)]) for word in found.tolist()]


def fill_spans(
    trained: Trained,
    special: SpecialIds,
    texts: Sequence[str],
    how: BeamSearch,
    batch_size: int = 32,
) -> list[list[str]]:
    """Predicts the text of each blank of some prompts with beam search.

    Args:
        trained: T5 model that was trained on spans.
        special: Ids of its special tokens.
        texts: Prompts with blanks.
        how, batch_size: See `search_in_batches`.

    Returns:
        For each prompt one text per blank, empty for blanks that the output of the model does not
        mention.

    Raises:
        UserError: A prompt has no blank, or more blanks than the model has sentinels.
    """
    sources = [_source(trained, special, parts_of(text)) for text in texts]
    targets = search_in_batches(trained, special, sources, how, batch_size, sentinels=True)
    return [
        [trained.tokenizer.decode(span) for span in spans_of(ids, special, text.count(BLANK))]
        for ids, text in zip(targets, texts)
    ]


def _source(trained: Trained, special: SpecialIds, parts: Sequence[str]) -> list[int]:
    """Returns the tokens of a prompt, with a sentinel for each blank between its parts."""
    if len(parts) - 1 > len(special.sentinels):
        raise UserError(
            f"the prompt has {len(parts) - 1} blanks, and the model knows "
            f"{len(special.sentinels)}: use no more than these"
        )
    source: list[int] = []
    for number, part in enumerate(parts):
        source += [special.sentinels[number - 1]] * (number > 0) + trained.tokenizer.encode(part)
    return [*source, special.eos]


def spans_of(found: Sequence[int], special: SpecialIds, n_blanks: int) -> list[list[int]]:
    """Splits an output of T5 into the tokens of each blank, from its sentinel to the next one.

    Args:
        found: Token ids of the output.
        special: Ids of the sentinels.
        n_blanks: Number of blanks in the prompt.

    Returns:
        One list of token ids per blank.
    """
    numbers = {sentinel: number for number, sentinel in enumerate(special.sentinels)}
    spans: list[list[int]] = [[] for _ in range(n_blanks)]
    here: list[int] | None = None
    for token in found:
        number = numbers.get(token)
        if number is not None:
            here = spans[number] if number < n_blanks else None
        elif here is not None:
            here.append(token)
    return spans
