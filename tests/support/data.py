"""Small corpora and token splits made in memory."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from gridformer.config import RunConfig
from gridformer.data import RunData, open_training, open_validation
from gridformer.data.prepare.reading import Cursor, Source, Text, TextSource
from gridformer.data.samples.batches import ShuffledBatches
from gridformer.data.tokenfolder import Kind, TokenFolder, TokenSplit

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "wizards")


class Stop(BaseException):
    """Like KeyboardInterrupt, but pytest does not treat it as its own."""


def list_source(
    documents: Callable[[], Iterable[str]],
    kind: Kind = "text",
    label: Callable[[str], str | None] = lambda document: None,
    n_bytes: int | None = None,
    languages: tuple[str, str] | None = None,
) -> TextSource:
    """Return a source of documents, of which every two are a pair if it has languages.

    `documents` is called for every pass.
    """

    def read(skipped: Counter[str], cursor: Cursor) -> Iterator[Text]:
        each = iter(documents())
        for one in each:
            yield Text(one, label=label(one), second=next(each) if languages else None)

    return Source("a list", read, kind=kind, n_bytes=n_bytes, languages=languages)


def listed(*documents: str) -> TextSource:
    return list_source(lambda: documents)


def sentences(number: int, words: int = 12) -> list[str]:
    """Return different documents, the same ones on every call."""
    draw = np.random.default_rng(number)
    return [" ".join(draw.choice(WORDS, words)) + f" {i}.\n" for i in range(number)]


def texts(sources: Sequence[TextSource], skipped: Counter[str] | None = None) -> list[str]:
    """Return the whole documents of some sources, and both texts of pairs."""
    out = [""]
    for source in sources:
        for item in source.read(Counter() if skipped is None else skipped, Cursor()):
            for text in item.texts:
                out[-1] += text
                if item.ends:
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


def pairs_source(number: int) -> TextSource:
    """Return pairs whose second text is the first one in capitals, and is not longer."""
    texts = [sentence.strip() for sentence in sentences(number, words=5)]
    both = [text for sentence in texts for text in (sentence, sentence.upper())]
    return list_source(lambda: both, "pairs", languages=("small", "LARGE"))


def labeled_source(number: int) -> TextSource:
    """Return documents whose label is their first word."""
    texts = sentences(number)
    return list_source(lambda: texts, "labeled", lambda text: text.split()[0])


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


def open_batches(run: RunConfig, folder: TokenFolder, split: str) -> ShuffledBatches:
    """Open batches of a run in one split of one folder."""
    data = RunData.of(folder)
    train = split == "train"
    batches = open_training(run, data) if train else open_validation(run, data)[""]
    assert isinstance(batches, ShuffledBatches)
    return batches
