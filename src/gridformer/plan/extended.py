"""Extends times along a line, from those of shortened steps to those of a whole one."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")


def extended(one: T, other: T, more: float) -> T:
    """Extends times along a line: one + more * (one - other), in all numbers of a dataclass.

    Args:
        one: The times with more layers.
        other: The times with one layer fewer in each stage.
        more: How many layers each stage has besides those of `one`.
    """
    return _extended(one, other, more)


def _extended(one: Any, other: Any, more: float) -> Any:
    if isinstance(one, float) and isinstance(other, float):
        return max(0.0, one + more * (one - other))
    if isinstance(one, int) and isinstance(other, int):
        return one + round(more * (one - other))
    if isinstance(one, dict):
        keys = [*one, *(key for key in other if key not in one)]
        return {key: _extended(one.get(key, 0.0), other.get(key, 0.0), more) for key in keys}
    if is_dataclass(one) and not isinstance(one, type):
        values = {
            f.name: _extended(getattr(one, f.name), getattr(other, f.name), more)
            for f in fields(one)
        }
        return replace(one, **values)
    return one
