"""Tokenizes batches in several processes, with the results in the order of the batches.

The library's own threads tokenize in parallel too, but its results become Python's lists one id at
a time under one lock. A worker process does that by itself and sends arrays.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gridformer.data.prepare.reading import Batch
from gridformer.data.tokenizer import Tokenizer, encodable
from gridformer.utils.errors import DataError

WORTH_WORKERS = 64_000_000  # bytes of text below which starting processes takes longer
_WAITING = 2  # batches of each worker that are read before they are needed


@dataclass(frozen=True)
class Encoded:
    """The tokens of a batch.

    Attributes:
        ids: The tokens of each piece.
        n_bytes: The bytes of their text as UTF-8.
    """

    ids: list[NDArray[Any]]
    n_bytes: int


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
    return len(os.sched_getaffinity(0))


def tokenized(
    batches: Iterator[Batch], tokenizer: Tokenizer, workers: int, dtype: np.dtype[Any]
) -> Iterator[tuple[Batch, Encoded]]:
    """Yields every batch with its tokens, in order. One worker is this process itself.

    Raises:
        DataError: A worker process died.
    """
    if workers <= 1:
        for batch in batches:
            yield batch, _encode(tokenizer, _texts(batch), dtype)
        return
    with _pool(tokenizer, workers, dtype) as pool:
        waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
        try:
            for batch in batches:
                waiting.append((batch, pool.submit(_work, _texts(batch))))
                if len(waiting) >= _WAITING * workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for first, future in waiting:
                yield first, future.result()
        except BrokenProcessPool:
            raise DataError(
                "a worker process of prepare died, probably for want of memory: use fewer --workers"
            ) from None


def _texts(batch: Batch) -> list[str]:
    return [encodable(piece.text) for piece in batch.pieces]


def _encode(tokenizer: Tokenizer, texts: list[str], dtype: np.dtype[Any]) -> Encoded:
    found = [np.asarray(ids, dtype=dtype) for ids in tokenizer.encode_batch(texts)]
    return Encoded(found, sum(len(text.encode()) for text in texts))


@contextlib.contextmanager
def _pool(
    tokenizer: Tokenizer, workers: int, dtype: np.dtype[Any]
) -> Iterator[ProcessPoolExecutor]:
    pool = ProcessPoolExecutor(
        workers,
        # A forked process would have the library's threads only in part.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(tokenizer.to_json(), tokenizer.eos_token, dtype),
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


# What a worker process keeps between batches.
_own: tuple[Tokenizer, np.dtype[Any]] | None = None


def _begin(tokenizer: str, eos_token: str, dtype: np.dtype[Any]) -> None:
    global _own
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    _own = Tokenizer.from_json(tokenizer, "", eos_token), dtype
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when its parent does, which a killed one could not ask for."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _work(texts: list[str]) -> Encoded:
    assert _own is not None
    return _encode(_own[0], texts, _own[1])
