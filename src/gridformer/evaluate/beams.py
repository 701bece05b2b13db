"""Greedy search and beam search with encoder-decoder models, on any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gridformer import comm
from gridformer.evaluate.decoding import Decoder
from gridformer.evaluate.loading import Trained
from gridformer.utils.errors import ConfigError

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


@dataclass
class Beams:
    """The beam search for one source, whose model computes the best continuations of its beams.

    The algorithm is that of Wu et al. 2016 and of Hugging Face's generate. Among the 2k best
    continuations of k beams, those that end are kept as hypotheses if they are among the first k,
    and the best k others continue. The search ends when no beam can beat the worst of k hypotheses.
    """

    end: int  # the token that ends a target
    search: BeamSearch
    scores: list[float] = field(init=False)  # the log-likelihood of each beam
    beams: list[list[int]] = field(init=False)  # the tokens of each beam
    # The scores and the tokens of the hypotheses, the best first.
    done: list[tuple[float, list[int]]] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        # All beams are equal at first, so only one of them counts.
        self.scores = [0.0, *[-torch.inf] * (self.search.beams - 1)]
        self.beams = [[] for _ in self.scores]

    def step(self, best: Sequence[tuple[float, int, int]]) -> list[tuple[int, int]]:
        """Extends the beams by one token.

        Args:
            best: The 2k best continuations: their log-likelihoods, beams and tokens.

        Returns:
            For each beam the number of the beam that it continues, and its new token. If the search
            has ended, nothing changes.
        """
        k, n = self.search.beams, len(self.beams[0]) + 1
        if self.ended:
            return [(beam, self.end) for beam in range(k)]
        power = n**self.search.length_penalty
        going_on = []
        for place, (score, beam, token) in enumerate(best):
            if token != self.end:
                going_on.append((score, beam, token))
            elif place < k:
                self.done.append((score / power, self.beams[beam]))
        going_on = going_on[:k]
        self.done = sorted(self.done, key=lambda one: -one[0])[:k]
        self.scores = [score for score, _, _ in going_on]
        self.beams = [[*self.beams[beam], token] for _, beam, token in going_on]
        if len(self.done) == k and self.done[-1][0] >= self.scores[0] / power:
            self.ended = True
        elif n == self.search.max_tokens:
            self.done += [(score / power, ids) for score, ids in zip(self.scores, self.beams)]
            self.ended = True
        return [(beam, token) for _, beam, token in going_on]

    def best(self) -> list[int]:
        """Returns the best hypothesis of a search that has ended."""
        return max(self.done, key=lambda one: one[0])[1]


@torch.no_grad()
def beam_search(
    trained: Trained,
    sources: Sequence[Sequence[int]],
    start: int,
    end: int,
    search: BeamSearch,
    never: Sequence[int] = (),
) -> list[list[int]]:
    """Searches for the most likely target of each source.

    All processes of the layout call it together, inside `Trained.in_use`. The beams of a source are
    read by one process; all processes get the best continuations and search in the same way.

    Args:
        trained: Encoder-decoder model.
        sources: Token ids of the sources.
        start: Id with which a target starts.
        end: Id with which a target ends.
        search: Settings.
        never: Ids that a target may not contain.

    Returns:
        Token ids of the best target of each source, without start and end.
    """
    k, v, device = search.beams, trained.model.config.vocab_size, trained.device
    decoder = Decoder(trained, len(sources), sources)
    searches = [Beams(end, search) for _ in range(decoder.n_rows)]
    banned = torch.tensor(list(never), dtype=torch.int64, device=device)
    tokens = torch.full((len(searches), 1), start)
    for step in range(search.max_tokens):
        logits = decoder.read(tokens)
        if step == 0:
            decoder.select(torch.arange(len(searches)).repeat_interleave(k), k)
        # Log-likelihoods of continuations, and numbers of the beam and the token, beam * v + token.
        best = torch.zeros(2, len(searches), 2 * k, dtype=torch.float64, device=device)
        if logits is not None and decoder.speaks:
            here = slice(decoder.rows.start // k, decoder.rows.stop // k)
            scores = torch.tensor(
                [one.scores for one in searches[here]], dtype=torch.float64, device=device
            )
            steps = logits.double().index_fill(1, banned, -torch.inf).log_softmax(-1)
            steps = steps.view(len(scores), -1, v)  # before the second step all beams are equal
            values, places = (scores[..., None] + steps).flatten(1).topk(2 * k)
            best[0, here], best[1, here] = values, places.double()
        values, places = comm.all_reduce(best, trained.axes.world, label="beams").tolist()
        chosen = [
            one.step([(value, *divmod(int(place), v)) for value, place in zip(*both)])
            for one, *both in zip(searches, values, places)
        ]
        if all(one.ended for one in searches):
            break
        decoder.select(
            torch.tensor(
                [number * k + beam for number, some in enumerate(chosen) for beam, _ in some]
            )
        )
        tokens = torch.tensor([[token] for some in chosen for _, token in some])
    return [one.best() for one in searches[: len(sources)]]


def search_in_batches(
    trained: Trained,
    sources: Sequence[Sequence[int]],
    search: BeamSearch,
    batch_size: int = 32,
    sentinels: bool = False,
) -> list[list[int]]:
    """Searches for the targets of sources, of which `batch_size` go through the model together.

    Those of about equal length go together, since their searches end at about the same time.
    Targets may contain the sentinels of blanks only with `sentinels`.
    """
    special, targets = trained.special, [[0]] * len(sources)
    never = {*special.never(trained.model.config.vocab_size)}
    banned = sorted(never - {*special.sentinels} if sentinels else never)
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    with trained.in_use():
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            some = [sources[i] for i in batch]
            best = beam_search(trained, some, special.start, special.eos, search, banned)
            for i, ids in zip(batch, best):
                targets[i] = ids
    return targets


def translate(
    trained: Trained, texts: Sequence[str], search: BeamSearch, batch_size: int = 32
) -> list[str]:
    """Generates the second text of each pair whose first text is given.

    All processes call it together and get the same texts.
    """
    tokenizer = trained.tokenizer
    sources = [[*ids, trained.special.eos] for ids in tokenizer.encode_batch(texts)]
    targets = search_in_batches(trained, sources, search, batch_size)
    return [tokenizer.decode(ids) for ids in targets]
