"""The sources of a mixture, their weights, and validation sets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gridformer.config.base import AnyPath, Config, any_of, shortened_text
from gridformer.utils.units import LARGEST_FLOAT

# Samples after which the order of sources repeats. A table has an entry for each, and making it
# takes a few microseconds per entry.
LONGEST_CYCLE = 100_000
_OFFERED = 10_000  # messages suggest weights that are multiples of 1/10000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
# Metrics have keys val_loss_NAME, and with these names the keys already mean parts of a loss.
_TAKEN = ("tokens", "pair", "labels", "answer")


def _source_name(name: str) -> str:
    if name and not _NAME.fullmatch(name):
        raise ValueError(
            f"{shortened_text(ascii(name))} is not a source name: use at most 64 letters, digits, "
            "., - and _, with a letter or a digit first"
        )
    if name in _TAKEN:
        raise ValueError(f"{name} is the name of a loss: use another, such as {name}-1")
    return name


SourceName = Annotated[str, AfterValidator(_source_name)]
Weight = Annotated[float, Field(ge=0, le=LARGEST_FLOAT)]


class SourceConfig(Config):
    """Tokens that a run reads, and their weight in the mixture."""

    name: SourceName = ""
    """Stages, metrics and messages call the source by this name. By default it is that of the
    folder or file."""
    path: AnyPath
    """This is a token folder that `gridformer prepare` wrote, the PREFIX of Megatron-LM's
    PREFIX.bin and PREFIX.idx, or datatrove's NAME.ds."""
    weight: Weight = 1.0
    """The source's share of a run's samples is its weight divided by the sum of all weights."""


class StageConfig(Config):
    """The weights of sources from some step on."""

    from_step: int = Field(ge=2)
    """This step is the first one with these weights."""
    weights: dict[str, Weight]
    """These are weights by the names of sources. A source that is not named is not read in this
    stage."""


class ValidationConfig(Config):
    """A validation or test set: a split of a token folder, with a loss of its own."""

    name: SourceName = ""
    """The loss of the set is val_loss_NAME in metrics.jsonl, and that of a test set test_loss_NAME.
    By default it is the name of the folder or file."""
    path: AnyPath | None = None
    """This is a token folder, or files of Megatron-LM or datatrove. By default it is the path of
    the source of this name."""
    split: Literal["train", "val"] = "val"
    """The set consists of this split of the path."""


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the smallest whole numbers in the exact ratio of weights as they are written.

    Args:
        weights: Numbers >= 0, of which at least one is positive. 0.1 means 1/10, and not the
            nearest float.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(one.denominator for one in exact))
    whole = [int(one * scale) for one in exact]
    common = math.gcd(*whole)
    return tuple(one // common for one in whole)


def weight_problems(where: str, names: Sequence[str], weights: Sequence[float]) -> list[str]:
    """Returns what is wrong with the weights of a stage, each with weights that work.

    Args:
        where: A name of the weights, as the beginning of a sentence.
        names: The names of the sources.
        weights: Their weights.
    """
    if not any(weights):
        return [f"{where} are all 0: give at least one source a positive weight"]
    cycle = sum(whole_weights(weights))
    if cycle <= LONGEST_CYCLE:
        return []
    offered = _rounded(weights)
    listed = ", ".join(f"{name}: {value:g}" for name, value in zip(names, offered))
    return [
        f"{where} have too many digits: the order of sources repeats only after "
        f"{shortened_text(cycle)} samples, and at most {LONGEST_CYCLE} are kept in memory: use "
        f"{{{listed}}}"
    ]


def repeated(names: Iterable[str]) -> list[str]:
    """Returns the names that occur more than once."""
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
    return [name for name, times in seen.items() if times > 1]


def unknown_source(key: str, name: str, known: Sequence[str]) -> str:
    """Returns the message about a name that no source has.

    Args:
        key: The key of the run file that has the name.
        name: The name.
        known: The names of the sources.
    """
    there = any_of(known)
    return f"{key} names {shortened_text(name)}, but data.sources has {there}: use one of these"


def _rounded(weights: Sequence[float]) -> list[float]:
    """Returns weights with sum 1 and at most four decimal places, positive ones staying so."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    parts = [max(1, round(one / total * _OFFERED)) if one else 0 for one in exact]
    largest = max(range(len(parts)), key=parts.__getitem__)
    parts[largest] += _OFFERED - sum(parts)
    return [part / _OFFERED for part in parts]
