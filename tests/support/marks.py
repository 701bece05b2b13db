"""Marks which cases run only in `make test-all`, and which need a package that may be missing.

The cases that only `make test-all` runs repeat what others test: another grid of a tested kind,
another pair, another variant of a script. They are never the only test of something.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

Value = TypeVar("Value")


def extra(package: str) -> Any:
    """Return a package that an extra of gridformer installs; skip the test where it is missing."""
    return pytest.importorskip(
        package, reason=f"{package} is not installed; `make test` installs it"
    )


def full_unless(
    quick: Callable[[Value], bool], values: Iterable[Value], unpack: bool = False
) -> list[Any]:
    """Return parameters for `pytest.mark.parametrize`; those that are not quick are marked `full`.

    Args:
        unpack: Whether values are tuples, for several names.
    """
    return [
        value
        if quick(value)
        else pytest.param(*(value if unpack else (value,)), marks=pytest.mark.full)  # type: ignore[misc]
        for value in values
    ]
