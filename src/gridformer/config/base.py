"""The base class of all config sections, and helpers for messages about their values."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Base class of every section: instances are immutable and unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )


def divisors(value: int) -> list[int]:
    """Returns all divisors of a positive integer in ascending order."""
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    return sorted({*small, *(value // d for d in small)})


def any_of(values: Iterable[object]) -> str:
    """Joins at least one value for a message that offers a choice, for example `1, 2, 4 or 8`.

    Of more than 10 values, only the first six and the last three are listed.
    """
    words = [str(v) for v in values]
    if len(words) > 10:
        words = [*words[:6], "...", *words[-3:]]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
