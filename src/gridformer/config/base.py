"""The base class of all config sections, and helpers for messages about their values."""

from __future__ import annotations

import difflib
import math
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from gridformer.utils.units import (
    LARGEST_FLOAT,
    LARGEST_INTEGER,
    LONGEST_NAME,
    LONGEST_PART,
    LONGEST_PATH,
)


class Bounded(BaseModel):
    """Base class of models that are read from files: every number in them has two bounds.

    Fields without a bound of their own get LARGEST_INTEGER or LARGEST_FLOAT.
    """

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        added = False
        for field in cls.model_fields.values():
            kind = field.annotation
            optional = get_origin(kind) in (Union, UnionType)
            kinds = {*get_args(kind)} if optional else {kind}
            if not kinds <= {int, float, type(None)} or kinds == {type(None)}:
                continue
            most = LARGEST_FLOAT if float in kinds else LARGEST_INTEGER
            has = {type(bound) for bound in field.metadata}
            missing: list[Any] = [] if has & {Le, Lt} else [Le(most)]
            missing += [] if has & {Ge, Gt} else [Ge(-most)]
            field.metadata += missing
            added = added or bool(missing)
        if added:
            cls.model_rebuild(force=True)


class Config(Bounded):
    """Base class of every section: instances are immutable and unknown keys are errors.

    A section yields from `_problems` what does not fit together in it, so that all is told at once.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    def _problems(self) -> Iterator[str]:
        yield from ()

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        if problems := [*self._problems()]:
            raise ValueError("; ".join(problems))
        return self


def shortened_text(value: object, at_most: int = 80) -> str:
    """Returns a value as text, without its middle if it has more than `at_most` characters."""
    try:
        text = str(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number of thousands of digits"
    half = at_most // 2
    return text if len(text) <= at_most else f"{text[:half]}...{text[-half:]}"


def _invisible(text: str) -> bool:
    """Returns whether a text has control characters, such as NUL, or unpaired surrogates."""
    return any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text)


def _file_name(name: str) -> str:
    if not name.strip():
        raise ValueError("is empty: use a word, such as run")
    if name in (".", "..") or _invisible(name) or {*"/\\"} & {*name}:
        raise ValueError(
            f"{shortened_text(ascii(name))} is not a folder name: use letters, digits, - and _"
        )
    if len(name.encode("utf-8", "replace")) > LONGEST_NAME:
        raise ValueError(
            f"{shortened_text(name)} is longer than {LONGEST_NAME} bytes: use a short word"
        )
    return name


def file_name(text: str, otherwise: str) -> str:
    """Returns `text` if it can be the name of a run, and `otherwise` if it cannot."""
    try:
        return _file_name(text)
    except ValueError:
        return otherwise


def _path(path: Path) -> Path:
    text = str(path)
    if _invisible(text):
        raise ValueError(f"{shortened_text(ascii(text))} contains control characters")
    longest = max((len(part.encode("utf-8", "replace")) for part in path.parts), default=0)
    if longest > LONGEST_PART or len(text.encode("utf-8", "replace")) > LONGEST_PATH:
        raise ValueError(f"{shortened_text(text)} is longer than a path can be")
    return path


# A text that becomes a part of a path, so it must be a name and not a path itself.
FileName = Annotated[str, AfterValidator(_file_name)]
# A path that a file system may accept.
AnyPath = Annotated[Path, AfterValidator(_path)]


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


def closest(word: str, known: Iterable[str]) -> str:
    """Returns the end of an error message that suggests a value in place of an unknown word.

    It is `: did you mean 'steps'?` if a known word is similar, else the list of all known words, or
    an empty text if there are none.
    """
    known = [*known]
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if match:
        return f": did you mean '{match[0]}'?"
    return f"; use one of {', '.join(known)}" if known else ""
