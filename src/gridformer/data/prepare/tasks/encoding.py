"""Turns the examples of data sets for fine-tuning into documents."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from gridformer.data.prepare.documents import Document, EncodedDocuments
from gridformer.data.prepare.tasks.glue import Text
from gridformer.data.prepare.tasks.race import ChoiceQuestion
from gridformer.data.prepare.tasks.squad import Asked
from gridformer.data.prepare.tokenizing import PickledTokenizer
from gridformer.data.tokenizer import Tokenizer

Example = TypeVar("Example")
Documents = Callable[[Tokenizer, Sequence[Example], Counter[str]], Iterator[Document]]


@dataclass(frozen=True)
class ExampleEncoder(Generic[Example]):
    """Turns examples into documents with `documents`, a function at the top level of a module."""

    tokenizer: PickledTokenizer
    documents: Documents[Example]

    @contextlib.contextmanager
    def begin(self) -> Iterator[Callable[[Sequence[Example]], EncodedDocuments]]:
        """See Encoder."""
        tokenizer = self.tokenizer.unpacked()

        def made(examples: Sequence[Example]) -> EncodedDocuments:
            dropped = Counter[str]()
            found = [*self.documents(tokenizer, examples, dropped)]
            return EncodedDocuments(found, dropped)

        yield made


def labeled_texts(
    tokenizer: Tokenizer, examples: Sequence[Text], dropped: Counter[str]
) -> Iterator[Document]:
    """Yields texts, or pairs of texts, with their labels.

    Args:
        tokenizer: The tokenizer.
        examples: The examples of a batch.
        dropped: Counts examples that are left out, by reason. Here none is.
    """
    for one, parts in _in_tokens(tokenizer, examples):
        yield _document(parts, [one.a, one.b], {}, one.label)


def numbered_texts(
    tokenizer: Tokenizer, examples: Sequence[Text], dropped: Counter[str]
) -> Iterator[Document]:
    """Yields texts, or pairs of texts, with their numbers.

    Args:
        tokenizer: The tokenizer.
        examples: The examples of a batch.
        dropped: Counts examples that are left out, by reason. Here none is.
    """
    for one, parts in _in_tokens(tokenizer, examples):
        yield _document(parts, [one.a, one.b], {"value": float(one.label)})


def _in_tokens(
    tokenizer: Tokenizer, examples: Sequence[Text]
) -> Iterator[tuple[Text, list[list[int]]]]:
    firsts = tokenizer.encode_batch([one.a for one in examples])
    seconds = tokenizer.encode_batch([one.b for one in examples])
    for one, a, b in zip(examples, firsts, seconds):
        yield one, [a, b]


def choices(
    tokenizer: Tokenizer, examples: Sequence[ChoiceQuestion], dropped: Counter[str]
) -> Iterator[Document]:
    """Yields questions with answers to choose from.

    Args:
        tokenizer: The tokenizer.
        examples: The examples of a batch.
        dropped: Counts examples that are left out, by reason. Here none is.
    """
    once = [*dict.fromkeys(one.passage for one in examples)]
    passages = dict(zip(once, tokenizer.encode_batch(once)))
    for one in examples:
        rest = tokenizer.encode_batch(one.continuations)
        texts = [one.passage, *one.continuations]
        yield _document([passages[one.passage], *rest], texts, {"right": one.right})


def answers(
    tokenizer: Tokenizer, examples: Sequence[Asked], dropped: Counter[str]
) -> Iterator[Document]:
    """Yields questions with the text that answers them.

    Args:
        tokenizer: The tokenizer.
        examples: The examples of a batch.
        dropped: Counts examples that are left out, by reason. Here none is.
    """
    asked = tokenizer.encode_batch([one.question.question for one in examples])
    once = [*dict.fromkeys(one.question.context for one in examples)]
    contexts = dict(zip(once, tokenizer.encode_with_offsets(once)))
    for one, question in zip(examples, asked):
        ids, offsets = contexts[one.question.context]
        texts = [one.question.question, one.question.context]
        yield _document([question, ids], texts, {"answer": _tokens_of(one, offsets)})


def _document(
    parts: Sequence[Sequence[int]],
    texts: Sequence[str],
    values: dict[str, Any],
    label: str | None = None,
) -> Document:
    return Document(
        np.array([i for part in parts for i in part], dtype=np.int32),
        {"parts": [len(part) for part in parts], **values},
        label,
        n_bytes=sum(len(text.encode("utf-8", "replace")) for text in texts),
    )


def _tokens_of(asked: Asked, offsets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns the first and the last token of an answer in its context; (-1, -1) for none."""
    if asked.start < 0:
        return -1, -1
    begin, end = asked.start, asked.start + len(asked.question.answers[0].rstrip())
    inside = [i for i, (low, high) in enumerate(offsets) if low < end and high > begin]
    return (inside[0], inside[-1]) if inside else (-1, -1)
