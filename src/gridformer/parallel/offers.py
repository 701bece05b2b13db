"""Refusals that say what would work: every offer was applied to the run and checked.

A rule that a run breaks names ways to mend it: changes that may work, the nearest first. An offer
is one with which the rule holds and no other rule is broken that was not before. Where one change
alone does not do that, others are added to it. So no offer leads to a new problem, whatever rules
there are, and taking the first offer again and again comes to an end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gridformer.config import RunConfig, any_of
from gridformer.utils.units import as_yaml

Changes = dict[str, Any]  # dotted keys of a run, and their new values

MOST_TRIED = 100  # of the changes that a way names
MOST_ADDED = 3  # changes beside one that does not suffice
MOST_COMBINED = 400  # runs looked at for an offer of several changes


@dataclass(frozen=True)
class Way:
    """Changes that may mend a rule, the nearest first, of which at most so many are offered."""

    changes: Callable[[], Iterable[Changes]]
    at_most: int = 1


@dataclass(frozen=True)
class Broken:
    """A rule that a run breaks.

    rule: its name, the same whatever the run's numbers are. text: what is wrong, and where.
    """

    rule: str
    text: str
    ways: Sequence[Way]


@dataclass(frozen=True)
class Problem:
    """A broken rule and what would mend it; as text one sentence for people."""

    rule: str
    text: str
    offers: tuple[Changes, ...]

    def __str__(self) -> str:
        return f"{self.text}: use {written(self.offers)}" if self.offers else self.text


Check = Callable[[RunConfig], list[Broken]]


def with_offers(run: RunConfig, check: Check) -> list[Problem]:
    """Every rule that a run breaks, with what would mend it.

    check: finds the broken rules of any run.
    """
    broken = check(run)
    names = {one.rule for one in broken}
    search = _Search(run, check)
    return [
        Problem(one.rule, one.text, tuple(search.offers(one, names - {one.rule}))) for one in broken
    ]


def with_changes(run: RunConfig, changes: Mapping[str, Any]) -> RunConfig | None:
    """The run with other values, by dotted keys; None if a section cannot be so."""
    values: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        before = getattr(run, section)
        values.setdefault(section, before.model_dump())[name] = value
    try:
        sections = {name: type(getattr(run, name))(**some) for name, some in values.items()}
    except ValueError:
        return None
    return run.model_copy(update=sections)


def written(offers: Sequence[Changes]) -> str:
    """`a=1, 2 or 3, or b=4 and c=5`: values of one key side by side."""
    words = []
    for keys, group in itertools.groupby(offers, tuple):
        some = [*group]
        if len(keys) == 1:
            values = [offer[keys[0]] for offer in some]
            if all(isinstance(value, int) for value in values):
                values.sort()
            words.append(f"{keys[0]}={any_of(map(as_yaml, values))}")
        else:
            words += [" and ".join(f"{k}={as_yaml(v)}" for k, v in offer.items()) for offer in some]
    return ", or ".join(words)


class _Search:
    """Tries changes of one run."""

    def __init__(self, run: RunConfig, check: Check) -> None:
        self._run, self._check = run, check
        self._found: dict[tuple[tuple[str, Any], ...], list[Broken] | None] = {}

    def offers(self, broken: Broken, allowed: set[str]) -> Iterator[Changes]:
        """allowed: rules that may stay broken."""
        some = False
        for way in broken.ways:
            tried = itertools.islice(way.changes(), MOST_TRIED)
            fitting = (changes for changes in tried if self._new(changes, allowed) == [])
            for changes in itertools.islice(fitting, way.at_most):
                some = True
                yield changes
        if some:
            return
        budget = iter(range(MOST_COMBINED))
        for n_added in range(1, MOST_ADDED + 1):
            for way in broken.ways:
                for changes in itertools.islice(way.changes(), MOST_TRIED):
                    combined = self._combined(changes, allowed, n_added, budget)
                    if combined is not None:
                        yield combined
                        some = True
                        break
            if some:
                return

    def _combined(
        self, changes: Changes, allowed: set[str], n_added: int, budget: Iterator[int]
    ) -> Changes | None:
        """These changes and up to `n_added` others, which mend what these break."""
        new = self._new(changes, allowed)
        if new is None or next(budget, None) is None:
            return None
        if not new:
            return changes
        if n_added == 0:
            return None
        for way in new[0].ways:
            for other in itertools.islice(way.changes(), MOST_TRIED):
                if other.keys() & changes.keys():
                    continue  # would undo what it is to complete
                found = self._combined(changes | other, allowed, n_added - 1, budget)
                if found is not None:
                    return found
        return None

    def _new(self, changes: Changes, allowed: set[str]) -> list[Broken] | None:
        """Rules beside the allowed that are broken with these changes; None if they cannot be."""
        key = tuple(sorted(changes.items()))
        if key not in self._found:
            run = with_changes(self._run, changes)
            self._found[key] = None if run is None else self._check(run)
        found = self._found[key]
        return None if found is None else [one for one in found if one.rule not in allowed]
