"""What all sections of a run have in common, and words for sentences about their values."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Base of every section: immutable, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )


def divisors(value: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    return sorted({*small, *(value // d for d in small)})


def as_yaml(value: object) -> str:
    """A value as run files and overrides have it: `true`, not `True`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def any_of(values: Iterable[object]) -> str:
    """`1, 2, 4 or 8`: the end of a sentence that offers a choice; long lists keep both ends."""
    words = [str(v) for v in values]
    if len(words) > 10:
        words = [*words[:6], "...", *words[-3:]]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
