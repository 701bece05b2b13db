"""Makes small models send their activations in chunks, for which they are far too small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from gridformer.config import LayoutConfig
from gridformer.parallel.auto import heuristics as rules
from gridformer.parallel.auto.cost import Choices


@contextmanager
def in_three() -> Iterator[None]:
    """Everything that travels whole travels in three chunks."""

    def cut(found: Choices, _: LayoutConfig) -> Choices:
        three = {
            name: replace(choice, n_chunks=3) if found.activation_bytes(choice) else choice
            for name, choice in found.products.items()
        }
        return replace(found, products=three)

    with patch.object(rules, "_chunked", cut):
        yield
