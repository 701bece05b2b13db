"""What the tasks of `gridformer evaluate` measure, a function for each kind."""

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
from gridformer.evaluate.examples import measure_set, predicted, read_labeled, score_examples
from gridformer.evaluate.loading import Trained
from gridformer.evaluate.prompts import JSON_LINES, read_input_text, read_texts
from gridformer.evaluate.scoring import ScoredWindow, continuation, prefix_id, score, sliding
from gridformer.evaluate.team import Team
from gridformer.utils.errors import DataError

Item = TypeVar("Item")

Numbers = dict[str, float]


@dataclass(frozen=True)
class Options:
    """Settings of an evaluation.

    Attributes:
        batch_size: About how many windows or texts go through the model together.
        stride: See `gridformer.evaluate.scoring.sliding`; 0 means what the model reads at once.
        limit: Only this number of documents is measured, the first ones; 0 means all.
        length: The model reads at most this number of tokens at once; 0 means `max_seq_len`.
        search: Settings of the search of tasks that translate.
    """

    batch_size: int = 8
    stride: int = 0
    limit: int = 0
    length: int = 0
    search: BeamSearch = field(default_factory=lambda: BeamSearch(max_tokens=256))

    def length_for(self, model: ModelConfig) -> int:
        """Returns how many tokens a model reads at once."""
        return self.length or model.max_seq_len


@dataclass(frozen=True)
class ScoredText:
    """A text to score, and by how many words and bytes its likelihood is divided."""

    text: str
    words: int
    bytes: int


def likelihood(
    trained: Trained, documents: Sequence[ScoredText], options: Options, begin: Sequence[int] = ()
) -> tuple[float, int]:
    """Returns the log-likelihood of all documents, and their number of tokens.

    Args:
        trained, options: The model, and the settings.
        documents: The documents.
        begin: Tokens of each document before those of its text.
    """
    length = options.length_for(trained.model.config)
    windows: list[ScoredWindow] = []
    prefix = prefix_id(trained.tokenizer)
    for ids in trained.tokenizer.encode_batch([document.text for document in documents]):
        windows += sliding([*begin, *ids], prefix, length, options.stride or length)
    found = score(trained, windows, options.batch_size)
    n_tokens = sum(window.n_targets for window in windows)
    return sum(one.log_likelihood for one in found), n_tokens


def perplexities(total: float, n_tokens: int, documents: Sequence[ScoredText]) -> Numbers:
    """Returns the measures that are computed from a log-likelihood.

    Args:
        total: The log-likelihood of all documents, in nats.
        n_tokens: Their number of tokens.
        documents: The documents, whose words and bytes it is divided by.
    """
    words, size = sum(d.words for d in documents), sum(d.bytes for d in documents)
    return {
        "word_perplexity": _exp(-total / words) if words else math.nan,
        "byte_perplexity": _exp(-total / size),
        "bits_per_byte": -total / size / math.log(2),
        "token_perplexity": _exp(-total / n_tokens),
        "tokens": n_tokens,
        "words": words,
    }


def _exp(nats: float) -> float:
    """Returns a perplexity; it is infinite if no float is as large, as for one very long word."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def text(trained: Trained, file: str, options: Options) -> Numbers:
    """Measures perplexity on a file, as one text.

    All ranks call this function and those below together.

    Args:
        trained: The model.
        file: The path of the file.
        options: The settings.

    Returns:
        The measures by name.

    Raises:
        UserError: The file cannot be read.
    """
    whole = read_input_text(Path(file))
    one = ScoredText(whole, len(whole.split()), len(whole.encode()))
    total, n_tokens = likelihood(trained, [one], options)
    return perplexities(total, n_tokens, [one])


def wikitext(trained: Trained, file: str, options: Options) -> Numbers:
    """Measures perplexity on pages of WikiText, per word of the original.

    Args:
        trained: The model.
        file: A file of WikiText as it is published.
        options: The settings.
    """
    pages = _first(read_pages(Path(file)), options)
    if not any(page.strip() for page in pages):
        raise DataError(f"{file}: its first {len(pages)} pages have no text: use a larger --limit")
    documents = [ScoredText(restored(p), n_words(p), len(p.encode())) for p in pages]
    # As in lm-evaluation-harness, a begin-of-text token of the tokenizer is predicted, too.
    total, n_tokens = likelihood(trained, documents, options, trained.tokenizer.begin_ids)
    return perplexities(total, n_tokens, documents) | {"documents": len(pages)}


def lambada(trained: Trained, file: str, options: Options) -> Numbers:
    """Measures how well a model predicts the last word of each text (Paperno et al. 2016).

    Args:
        trained: The model.
        file: JSON lines with the key `text`.
        options: The settings.
    """
    texts = _first(read_texts(Path(file), "text"), options)
    windows, length = [], options.length_for(trained.model.config)
    for (whole,) in texts:
        before, _, word = whole.rpartition(" ")
        windows.append(continuation(trained.tokenizer, before, f" {word}", length))
    found = score(trained, windows, options.batch_size)
    mean = sum(one.log_likelihood for one in found) / len(found)
    return {
        "accuracy": sum(one.greedy for one in found) / len(found),
        "perplexity": _exp(-mean),
        "documents": len(texts),
    }


def labels(trained: Trained, file: str, options: Options) -> Numbers:
    """Measures how often the classifier gives the right label.

    Args:
        trained: The model, which has a classifier.
        file: JSON lines with a text, or two, and a label.
        options: The settings.
    """
    records = _first(read_labeled(Path(file), trained.run, trained.label_names), options)
    found = predicted(trained, [text for text, _ in records], options.batch_size)
    right = sum(label == wanted for label, (_, wanted) in zip(found, records))
    return {"accuracy": right / len(records), "documents": len(records)}


def examples(trained: Trained, folder: str, options: Options) -> Numbers:
    """Measures a fine-tuned model on the validation split of a folder of examples.

    Args:
        trained: The model.
        folder: The token folder of the examples.
        options: The settings, of which `batch_size` counts.
    """
    return score_examples(trained, folder, options.batch_size)


def named_set(trained: Trained, name: str, options: Options) -> Numbers:
    """Measures the loss of a named set of the run, and its scores.

    Args:
        trained: The model.
        name: The name of the set in data.validation or data.test.
        options: Not used: the run says how a set is read.
    """
    return measure_set(trained, name)


def bleu(trained: Trained, file: str, options: Options) -> Numbers:
    """Measures BLEU (Papineni et al. 2002; Post 2018) of generated second texts of pairs.

    Args:
        trained: The model, which has learned pairs.
        file: JSON lines with the keys `source` and `target`.
        options: The settings, those of the search among them.
    """
    import sacrebleu

    pairs = _first(read_texts(Path(file), "source", "target"), options)
    sources = [source for source, _ in pairs]
    said = translate(trained, trained.special, sources, options.search, options.batch_size)
    result = sacrebleu.corpus_bleu(said, [[target for _, target in pairs]])
    return {"bleu": result.score, "documents": len(pairs)}


def lm_eval(trained: Trained, task: str, options: Options) -> Numbers:
    """Measures a task of lm-evaluation-harness, which runs on rank 0.

    Args:
        trained: The model.
        task: The name of the task there.
        options: The settings.

    Returns:
        The measures by name; nothing on other ranks than 0.
    """
    team = Team(trained, options.batch_size)
    if trained.axes.world.index:
        team.follow()
        return {}
    from gridformer.evaluate.harness import measured

    found = measured(team, task, options.limit, options.length)
    team.release()
    return found


def _first(values: Sequence[Item], options: Options) -> Sequence[Item]:
    return values[: options.limit] if options.limit else values


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


def n_words(page: str) -> int:
    """Returns the number of words of an original page, by which perplexity is normalized."""
    return len(re.split(r"\s+", page))


def read_pages(path: Path) -> list[str]:
    """Returns the pages of a file: JSON lines with the key `page`, or the text of WikiText.

    Raises:
        DataError: The file cannot be read, or has no text.
    """
    if path.suffix in JSON_LINES:
        pages = [page for (page,) in read_texts(path, "page")]
    else:
        text = read_input_text(path)
        starts = [found.start() for found in _HEADING.finditer(text)]
        cuts = sorted({0, *starts, len(text)})
        pages = [text[a:b] for a, b in pairwise(cuts) if text[a:b].strip()]
    if not any(page.strip() for page in pages):
        raise DataError(f"{path}: has no text")
    return pages
