"""Measures of the likelihood of texts, and how often classifiers and translations are right."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from gridformer.config import ModelConfig
from gridformer.evaluate.beams import BeamSearch, translate
from gridformer.evaluate.examples import predicted, read_labeled
from gridformer.evaluate.loading import Trained
from gridformer.evaluate.prompts import JSON_LINES, read_input_text, read_texts
from gridformer.evaluate.scoring import ScoredWindow, continuation, prefix_id, score, sliding
from gridformer.evaluate.team import Team
from gridformer.utils.errors import DataError

Item = TypeVar("Item")

Numbers = dict[str, float]


@dataclass(frozen=True)
class Options:
    """Settings of an evaluation."""

    batch_size: int = 8  # about how many windows or texts go through the model together
    stride: int = 0  # of `gridformer.evaluate.scoring.sliding`; 0 means `length`
    limit: int = 0  # only this number of documents is measured, the first ones; 0 means all
    length: int = 0  # the most tokens that the model reads at once; 0 means `max_seq_len`
    search: BeamSearch = field(default_factory=lambda: BeamSearch(max_tokens=256))

    def length_for(self, model: ModelConfig) -> int:
        """Returns how many tokens a model reads at once."""
        return self.length or model.max_seq_len

    def first(self, values: Sequence[Item]) -> Sequence[Item]:
        """Returns the documents that are measured."""
        return values[: self.limit] if self.limit else values


def perplexities(
    trained: Trained,
    texts: Sequence[str],
    n_words: int,
    n_bytes: int,
    options: Options,
    begin: Sequence[int] = (),
) -> Numbers:
    """Returns the likelihood of texts, divided by `n_words` words and by `n_bytes` bytes.

    The tokens `begin` come before those of each text, and are predicted, too.
    """
    length = options.length_for(trained.model.config)
    windows: list[ScoredWindow] = []
    prefix = prefix_id(trained.tokenizer)
    for ids in trained.tokenizer.encode_batch([*texts]):
        windows += sliding([*begin, *ids], prefix, length, options.stride or length)
    total = sum(one.log_likelihood for one in score(trained, windows, options.batch_size))
    n_tokens = sum(window.n_targets for window in windows)
    return {
        "word_perplexity": _exp(-total / n_words) if n_words else math.nan,
        "byte_perplexity": _exp(-total / n_bytes),
        "bits_per_byte": -total / n_bytes / math.log(2),
        "token_perplexity": _exp(-total / n_tokens),
        "tokens": n_tokens,
        "words": n_words,
    }


def _exp(nats: float) -> float:
    """Returns a perplexity; it is infinite if no float is as large, as for one very long word."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def text(trained: Trained, file: str, options: Options) -> Numbers:
    """Measures perplexity on a file, as one text.

    All ranks call this function and the ones below together, and get the measures by name.
    """
    whole = read_input_text(Path(file))
    return perplexities(trained, [whole], len(whole.split()), len(whole.encode()), options)


def wikitext(trained: Trained, file: str, options: Options) -> Numbers:
    """Measures perplexity on pages of WikiText as it is published, per word of the original."""
    pages = options.first(read_pages(Path(file)))
    if not any(page.strip() for page in pages):
        raise DataError(f"{file}: its first {len(pages)} pages have no text: use a larger --limit")
    words = sum(len(re.split(r"\s+", page)) for page in pages)
    n_bytes = sum(len(page.encode()) for page in pages)
    # As in lm-evaluation-harness, a begin-of-text token of the tokenizer is predicted, too.
    begin = trained.tokenizer.begin_ids
    measured = perplexities(trained, [*map(restored, pages)], words, n_bytes, options, begin)
    return measured | {"documents": len(pages)}


def lambada(trained: Trained, file: str, options: Options) -> Numbers:
    """Measures how well a model predicts the last word of each text (Paperno et al. 2016).

    The file has JSON lines with the key `text`.
    """
    windows, length = [], options.length_for(trained.model.config)
    for (whole,) in options.first(read_texts(Path(file), "text")):
        before, _, word = whole.rpartition(" ")
        windows.append(continuation(trained.tokenizer, before, f" {word}", length))
    scores = score(trained, windows, options.batch_size)
    mean = sum(one.log_likelihood for one in scores) / len(scores)
    return {
        "accuracy": sum(one.greedy for one in scores) / len(scores),
        "perplexity": _exp(-mean),
        "documents": len(scores),
    }


def labels(trained: Trained, file: str, options: Options) -> Numbers:
    """Measures how often the classifier gives the right label of texts in JSON lines."""
    records = options.first(read_labeled(Path(file), trained.run, trained.label_names))
    labels = predicted(trained, [text for text, _ in records], options.batch_size)
    right = sum(label == wanted for label, (_, wanted) in zip(labels, records))
    return {"accuracy": right / len(records), "documents": len(records)}


def bleu(trained: Trained, file: str, options: Options) -> Numbers:
    """Measures BLEU (Papineni et al. 2002; Post 2018) of generated second texts of pairs.

    The file has JSON lines with the keys `source` and `target`.
    """
    import sacrebleu

    pairs = options.first(read_texts(Path(file), "source", "target"))
    sources = [source for source, _ in pairs]
    translations = translate(trained, sources, options.search, options.batch_size)
    result = sacrebleu.corpus_bleu(translations, [[target for _, target in pairs]])
    return {"bleu": result.score, "documents": len(pairs)}


def lm_eval(trained: Trained, task: str, options: Options) -> Numbers:
    """Measures a task of lm-evaluation-harness on rank 0; other ranks return nothing."""
    team = Team(trained, options.batch_size)
    if trained.axes.world.index:
        team.follow()
        return {}
    from gridformer.evaluate.harness import measured

    numbers = measured(team, task, options.limit, options.length)
    team.release()
    return numbers


# --------------------------------------------------------------------------- WikiText

# A heading of the first level begins a page: ` = Title = `.
_HEADING = re.compile(r"^ = [^=\n](?:.*[^=\n])? = *$", re.MULTILINE)
# Spaces that were put between marks, in the order in which they are taken out.
_WITHIN = [("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")]
_BEFORE = ":;.!?,"
_PAIRS = [("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'")]
_AFTER = [
    *((" ".join("=" * n), "=" * n) for n in (4, 3, 2)),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]


def restored(page: str) -> str:
    """Returns the text of a page without the spaces that tokenization has put in."""
    for old, new in _WITHIN:
        page = page.replace(old, new)
    for mark in _BEFORE:
        page = page.replace(f" {mark} ", f"{mark} ")
    for left, right in _PAIRS:
        inside = rf"{re.escape(left)}\s*([^{re.escape(right)}]*?)\s*{re.escape(right)}"
        page = re.sub(inside, rf"{left}\1{right}", page)
    for old, new in _AFTER:
        page = page.replace(old, new)
    return page


def read_pages(path: Path) -> list[str]:
    """Returns the pages of a file: JSON lines with the key `page`, or the text of WikiText.

    Raises:
        DataError: The file cannot be read, or has no text.
    """
    if path.suffix in JSON_LINES:
        pages = [page for (page,) in read_texts(path, "page")]
    else:
        text = read_input_text(path)
        cuts = sorted({0, *(heading.start() for heading in _HEADING.finditer(text)), len(text)})
        pages = [text[a:b] for a, b in pairwise(cuts) if text[a:b].strip()]
    if not any(page.strip() for page in pages):
        raise DataError(f"{path}: has no text")
    return pages
