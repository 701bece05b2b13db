"""Small corpora and token splits made in memory."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gridformer.config import RunConfig
from gridformer.data.prepare.reading import Cursor
from gridformer.data.prepare.sources import Source
from gridformer.data.prepare.text_chunks import TextChunk, labeled, text_chunks
from gridformer.data.tokenfolder import Kind, PartEntry, TokenFolder, TokenSplit

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "wizards")


@dataclass
class ListSource:
    """A source of given documents; `documents` is called for every pass."""

    documents: Callable[[], Iterable[str]]
    name: str = "a list"
    license: str | None = None
    n_bytes: int | None = None
    kind: Kind = "text"
    languages: tuple[str, str] | None = None
    parts: tuple[PartEntry, ...] = ()
    label: Callable[[str], str | None] = lambda document: None

    def chunks(self, skipped: Counter[str], cursor: Cursor | None = None) -> Iterator[TextChunk]:
        for document in self.documents():
            yield from labeled(text_chunks([document]), self.label(document))

    def sample(self) -> Iterator[TextChunk]:
        return self.chunks(Counter())


def listed(*documents: str) -> ListSource:
    return ListSource(lambda: documents)


def sentences(number: int, words: int = 12) -> list[str]:
    """Return different documents, the same ones on every call."""
    draw = np.random.default_rng(number)
    return [" ".join(draw.choice(WORDS, words)) + f" {i}.\n" for i in range(number)]


def texts(sources: Sequence[Source]) -> list[str]:
    """Return the whole documents of some sources."""
    out = [""]
    for source in sources:
        for chunk in source.chunks(Counter()):
            out[-1] += chunk.text
            if chunk.ends:
                out.append("")
    return out[:-1]


def documents(folder: TokenFolder) -> dict[str, list[str]]:
    """Decode the documents of each split, without their end-of-text tokens."""
    eos = folder.index.eos_token
    return {
        split.name: [
            folder.tokenizer.decode(split.document(d).tolist()).removesuffix(eos)
            for d in range(split.n_documents)
        ]
        for split in (folder.train, folder.val)
    }


def split_of(documents: list[list[int]], eos: int, **columns: Sequence[object]) -> TokenSplit:
    """Return a split of documents with columns; an end-of-text token is added to each document."""
    ended = [[*ids, eos] for ids in documents]
    return TokenSplit(
        "val",
        Path("val.bin"),
        np.array([i for ids in ended for i in ids]),
        np.cumsum([0, *map(len, ended)]),
        1 + max(map(max, ended)),
        {name: np.array(values) for name, values in columns.items()},
    )


def counting_split(n_tokens: int, name: str = "train") -> TokenSplit:
    """Return a split whose token at position i is i, so that a batch shows where it was read."""
    return TokenSplit(
        name,
        Path(f"{name}.bin"),
        np.arange(n_tokens),
        np.array([0, n_tokens]),
        vocab_size=max(1, n_tokens),
    )


def pairs_source(number: int) -> ListSource:
    """Return pairs whose second text is the first one in capitals, and is not longer."""
    texts = [sentence.strip() for sentence in sentences(number, words=5)]
    both = [text for sentence in texts for text in (sentence, sentence.upper())]
    return ListSource(lambda: both, kind="pairs", languages=("small", "LARGE"))


def labeled_source(number: int) -> ListSource:
    """Return documents whose label is their first word."""
    texts = sentences(number)
    return ListSource(lambda: texts, kind="labeled", label=lambda text: text.split()[0])


def a_run(folder: TokenFolder, family: str = "gpt2", **values: object) -> RunConfig:
    """Return a run of a tiny model on a folder; values are overrides such as model__n_labels=2."""
    raw: dict[str, dict[str, object]] = {
        "model": {"family": family, "n_layers": 1, "hidden_size": 8, "n_heads": 2},
        "data": {"path": folder.path},
        "train": {"global_batch": 8},
    }
    for key, value in {"model__max_seq_len": 32, **values}.items():
        section, _, name = key.partition("__")
        raw[section][name] = value
    return RunConfig.model_validate(raw)
