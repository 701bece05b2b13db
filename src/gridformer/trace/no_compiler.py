"""Keeps torch's compiler and what it needs from being loaded; see the two contexts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gridformer.trace.no_sympy import without_sympy
from gridformer.utils.no_dynamo import without_dynamo


@contextmanager
def without_compiler() -> Iterator[None]:
    """Does without `torch._dynamo` and symbolic shapes inside the context."""
    with without_dynamo(), without_sympy():
        yield
