"""Fixtures for all tests."""

from collections.abc import Iterator

import pytest

from tests.multirank.pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Persistent worker processes: `pool.run(4, function, *args)`; see tests/multirank/pool.py."""
    workers = WorkerPool()
    yield workers
    workers.close()
