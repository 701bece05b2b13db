"""Keeps torch's compiler, and other slow imports, from being loaded; see the contexts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gridformer.trace.no_dtensor import without_dtensors
from gridformer.trace.no_sympy import without_sympy
from gridformer.utils.no_dynamo import without_dynamo


@contextmanager
def without_compiler() -> Iterator[None]:
    """Replaces `torch._dynamo`, symbolic shapes and DTensors by placeholders inside the context."""
    with without_dynamo(), without_sympy(), without_dtensors():
        yield
