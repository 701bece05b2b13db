"""Tokenizes batches in several processes, with the results in the order of the batches.

The library's own threads tokenize in parallel too, but its results become Python's lists one id at
a time under one lock. A worker process makes these lists in parallel to others and sends arrays.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from gridformer.data.prepare.reading import ItemBatch
from gridformer.data.prepare.text_chunks import TextChunk
from gridformer.data.tokenizer import Tokenizer, encodable
from gridformer.utils.errors import DataError
from gridformer.utils.hardware import n_cores
from gridformer.utils.parent import end_with_parent

WORTH_WORKERS = 64_000_000  # bytes of text below which starting processes takes longer
_WAITING = 2  # batches of each worker that are read before they are needed

Item = TypeVar("Item")
Made = TypeVar("Made")
GivenItem = TypeVar("GivenItem", contravariant=True)
ItsMade = TypeVar("ItsMade", covariant=True)


class Encoder(Protocol[GivenItem, ItsMade]):
    """Turns the items of a batch into tokens. It is pickled into each worker process."""

    def begin(self) -> AbstractContextManager[Callable[[Sequence[GivenItem]], ItsMade]]:
        """Returns the function that encodes a batch. Each process calls this once.

        The results of a batch depend on its items alone.
        """


def workers_for(wanted: int | None, n_bytes: int | None) -> int:
    """Returns how many worker processes to start.

    Args:
        wanted: What the user wants; None chooses one for each core, or none for little text.
        n_bytes: The bytes of all sources, if known.
    """
    if wanted is not None:
        return wanted
    if n_bytes is not None and n_bytes < WORTH_WORKERS:
        return 1
    return n_cores()


def encoded_batches(
    batches: Iterator[ItemBatch[Item]], encoder: Encoder[Item, Made], workers: int
) -> Iterator[tuple[ItemBatch[Item], Made]]:
    """Yields every batch with its encoding, in order. One worker is this process itself.

    Args:
        batches: The batches.
        encoder: Turns a batch into tokens; each worker process has a copy.
        workers: The number of processes that do it.

    Raises:
        DataError: A worker process died.
    """
    if workers <= 1:
        with encoder.begin() as encode:
            for batch in batches:
                yield batch, encode(batch.items)
        return
    with _pool(encoder, workers) as pool:
        waiting: deque[tuple[ItemBatch[Item], Future[Made]]] = deque()
        try:
            for batch in batches:
                waiting.append((batch, pool.submit(_work, batch.items)))
                if len(waiting) >= _WAITING * workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for first, future in waiting:
                yield first, future.result()
        except BrokenProcessPool:
            raise DataError(
                "a worker process of prepare died, probably for lack of memory: use fewer --workers"
            ) from None


@dataclass(frozen=True)
class PickledTokenizer:
    """A tokenizer as it is sent to worker processes."""

    text: str
    eos_token: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> PickledTokenizer:
        """Packs a tokenizer without its origin."""
        return cls(tokenizer.to_json(), tokenizer.eos_token)

    def unpacked(self) -> Tokenizer:
        """Returns the tokenizer."""
        return Tokenizer.from_json(self.text, "tokenizer.json", self.eos_token)


@dataclass(frozen=True)
class EncodedTexts:
    """The tokens of a batch of texts.

    Attributes:
        ids: The tokens of each chunk.
        n_bytes: The bytes of their text as UTF-8.
    """

    ids: list[NDArray[Any]]
    n_bytes: int


@dataclass(frozen=True)
class TextEncoder:
    """Turns chunks of text into tokens."""

    tokenizer: PickledTokenizer
    dtype: np.dtype[Any]

    @contextlib.contextmanager
    def begin(self) -> Iterator[Callable[[Sequence[TextChunk]], EncodedTexts]]:
        """See Encoder."""
        tokenizer = self.tokenizer.unpacked()

        def encode(chunks: Sequence[TextChunk]) -> EncodedTexts:
            texts = [encodable(chunk.text) for chunk in chunks]
            found = [np.asarray(ids, dtype=self.dtype) for ids in tokenizer.encode_batch(texts)]
            return EncodedTexts(found, sum(len(text.encode()) for text in texts))

        yield encode


@contextlib.contextmanager
def _pool(encoder: Encoder[Any, Any], workers: int) -> Iterator[ProcessPoolExecutor]:
    pool = ProcessPoolExecutor(
        workers,
        # A forked process would have the library's threads only in part.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(encoder,),
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


# What a worker process keeps between batches. It is never closed: it ends with the process.
_own: Callable[[Sequence[Any]], Any] | None = None
_open = ExitStack()


def _begin(encoder: Encoder[Any, Any]) -> None:
    global _own
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    end_with_parent()
    _own = _open.enter_context(encoder.begin())


def _work(items: Sequence[Any]) -> Any:
    assert _own is not None
    return _own(items)
