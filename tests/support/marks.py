"""Which cases `make test` runs, and which `make test-all` alone.

What is left to `make test-all` is more of the same: another grid of a sort that is tested, another
pair, another variant of a script. Never the only test of something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

Value = TypeVar("Value")


def full_unless(
    quick: Callable[[Value], bool], values: Iterable[Value], unpack: bool = False
) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: those that are not quick carry the mark `full`.

    unpack: values are tuples, for several names.
    """
    return [
        value
        if quick(value)
        else pytest.param(*(value if unpack else (value,)), marks=pytest.mark.full)  # type: ignore[misc]
        for value in values
    ]
