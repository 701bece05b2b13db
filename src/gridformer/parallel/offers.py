"""Error messages that suggest what works: every suggestion has been applied to the run and checked.

A broken rule names ways to fix it: changes that may work, nearest first. A change is offered only
if the rule then holds and no rule is broken that held before. If no single change achieves that,
others are combined with it. So no offer leads to a new problem, whatever rules exist, and applying
the first offer repeatedly comes to an end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gridformer.config import RunConfig, any_of
from gridformer.utils.units import format_value

Changes = dict[str, Any]  # dotted keys of a run to their new values

MOST_TRIED = 100  # changes of one way
MOST_ADDED = 3  # changes added to one that does not suffice
MOST_COMBINED = 400  # runs checked for an offer of several changes


@dataclass(frozen=True)
class Way:
    """Changes that may fix a broken rule, nearest first; at most `at_most` of them are offered."""

    changes: Callable[[], Iterable[Changes]]
    at_most: int = 1


@dataclass(frozen=True)
class Broken:
    """A rule that a run breaks.

    Attributes:
        rule: Name of the rule, independent of the run's numbers.
        text: What is wrong, and where.
        ways: Ways that may fix it.
    """

    rule: str
    text: str
    ways: Sequence[Way]


@dataclass(frozen=True)
class ProblemWithOffers:
    """A broken rule with the changes that fix it; `str` gives a sentence for an error message."""

    rule: str
    text: str
    offers: tuple[Changes, ...]

    def __str__(self) -> str:
        return f"{self.text}: use {written(self.offers)}" if self.offers else self.text


Check = Callable[[RunConfig], list[Broken]]


def with_offers(run: RunConfig, check: Check) -> list[ProblemWithOffers]:
    """Returns every rule that a run breaks, with changes that fix it.

    Args:
        run: The run.
        check: Returns the broken rules of any run.
    """
    broken = check(run)
    names = {one.rule for one in broken}
    search = _Search(run, check)
    return [
        ProblemWithOffers(one.rule, one.text, tuple(search.offers(one, names - {one.rule})))
        for one in broken
    ]


def with_changes(run: RunConfig, changes: Mapping[str, Any]) -> RunConfig | None:
    """Returns the run with some dotted keys changed; None if a section refuses the values.

    Args:
        run: The run.
        changes: New values by dotted key, such as `layout.cols`.
    """
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
    """Formats offers as `a=1, 2 or 3, or b=4 and c=5`, with the values of one key together."""
    words = []
    for keys, group in itertools.groupby(offers, tuple):
        some = [*group]
        if len(keys) == 1:
            values = [offer[keys[0]] for offer in some]
            if all(isinstance(value, int) for value in values):
                values.sort()
            words.append(f"{keys[0]}={any_of(map(format_value, values))}")
        else:
            words += [
                " and ".join(f"{k}={format_value(v)}" for k, v in offer.items()) for offer in some
            ]
    return ", or ".join(words)


class _Search:
    """Tries changes of one run and remembers the results."""

    def __init__(self, run: RunConfig, check: Check) -> None:
        self._run, self._check = run, check
        self._found: dict[tuple[tuple[str, Any], ...], list[Broken] | None] = {}

    def offers(self, broken: Broken, allowed: set[str]) -> Iterator[Changes]:
        """Yields changes after which only `allowed` rules are broken."""
        some = False
        for way in broken.ways:
            tried = itertools.islice(way.changes(), MOST_TRIED)
            fitting = (changes for changes in tried if self._new(changes, allowed) == [])
            for changes in itertools.islice(fitting, way.at_most):
                some = True
                yield changes
        if some:
            return
        for n_added in range(1, MOST_ADDED + 1):
            for way in broken.ways:
                budget = iter(range(MOST_COMBINED))  # so that no way leaves nothing to the next
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
        """Adds up to `n_added` changes that fix what these break; None if there are none."""
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
                    continue  # would overwrite a change
                found = self._combined(changes | other, allowed, n_added - 1, budget)
                if found is not None:
                    return found
        return None

    def _new(self, changes: Changes, allowed: set[str]) -> list[Broken] | None:
        """Returns the broken rules that are not allowed; None if the changes are invalid."""
        key = tuple(sorted(changes.items()))
        if key not in self._found:
            run = with_changes(self._run, changes)
            self._found[key] = None if run is None else self._check(run)
        found = self._found[key]
        return None if found is None else [one for one in found if one.rule not in allowed]
