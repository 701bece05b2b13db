"""Tokenizes batches in several processes, with the results in the order of the batches.

The library's own threads tokenize in parallel too, but its results become Python's lists one id at
a time under one lock. A worker process makes these lists in parallel to others and sends arrays.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

from gridformer.data.prepare.reading import Cursor
from gridformer.utils.errors import DataError
from gridformer.utils.hardware import n_cores
from gridformer.utils.process import end_with_parent

WORTH_WORKERS = 64_000_000  # bytes of text below which starting processes takes longer
_WAITING = 2  # batches of each worker that are read before they are needed

Item = TypeVar("Item")
Made = TypeVar("Made")
# Opens the function that encodes the items of a batch, whose results depend on these alone. It is
# pickled into each worker process, which calls it once.
Encoder = Callable[[], AbstractContextManager[Callable[[Sequence[Item]], Made]]]


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
    batches: Iterator[tuple[list[Item], Cursor]], encoder: Encoder[Item, Made], workers: int
) -> Iterator[tuple[Cursor, Made]]:
    """Yields the encoding of every batch, in order. One worker is this process itself.

    Raises:
        DataError: A worker process died.
    """
    if workers <= 1:
        with encoder() as encode:
            for items, after in batches:
                yield after, encode(items)
        return
    pool = ProcessPoolExecutor(
        workers,
        # A forked process would have the library's threads only in part.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(encoder,),
    )
    waiting: deque[tuple[Cursor, Future[Made]]] = deque()
    try:
        for items, after in batches:
            waiting.append((after, pool.submit(_work, items)))
            if len(waiting) >= _WAITING * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()
    except BrokenProcessPool:
        raise DataError(
            "a worker process of prepare died, probably for lack of memory: use fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


# What a worker process keeps between batches. It is never closed: it ends with the process.
_own: Callable[[Sequence[Any]], Any] | None = None
_open = ExitStack()


def _begin(encoder: Encoder[Any, Any]) -> None:
    global _own
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    end_with_parent()
    _own = _open.enter_context(encoder())


def _work(items: Sequence[Any]) -> Any:
    assert _own is not None
    return _own(items)
