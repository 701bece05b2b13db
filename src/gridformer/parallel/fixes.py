"""Errors that say what works: each suggested change has been applied to the run and checked.

A change is suggested only if the violated rule then holds and no further rule is violated. If no
single change achieves that, others are combined with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gridformer.config import RunConfig, any_of
from gridformer.utils.units import format_value

Changes = dict[str, Any]  # dotted keys of a run to their new values

MOST_TRIED = 100  # changes of one fix
MOST_ADDED = 3  # changes added to one that does not suffice
MOST_COMBINED = 400  # runs checked for a suggestion of several changes


@dataclass(frozen=True)
class Fix:
    """Changes that may repair a violation, nearest first; at most `at_most` are suggested."""

    changes: Callable[[], Iterable[Changes]]
    at_most: int = 1


@dataclass(frozen=True)
class Violation:
    """A rule that a run breaks: its name without the run's numbers, what is wrong, and fixes."""

    rule: str
    text: str
    fixes: Sequence[Fix]


@dataclass(frozen=True)
class Refusal:
    """A violation with the changes that repair it; `str` gives a sentence for an error message."""

    rule: str
    text: str
    changes: tuple[Changes, ...]

    def __str__(self) -> str:
        return f"{self.text}: use {written(self.changes)}" if self.changes else self.text


Check = Callable[[RunConfig], list[Violation]]


def with_fixes(run: RunConfig, check: Check) -> list[Refusal]:
    """Returns every violation of a run, as `check` finds them, with changes that repair it."""
    violations = check(run)
    rules = {violation.rule for violation in violations}
    search = _Search(run, check)
    return [
        Refusal(one.rule, one.text, tuple(search.changes_for(one, rules - {one.rule})))
        for one in violations
    ]


def with_changes(run: RunConfig, changes: Mapping[str, Any]) -> RunConfig | None:
    """Returns the run with some dotted keys changed; None if a section refuses the values."""
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


def written(suggested: Sequence[Changes]) -> str:
    """Formats changes as `a=1, 2 or 3, or b=4 and c=5`, with the values of one key together."""
    words = []
    for keys, group in itertools.groupby(suggested, tuple):
        if len(keys) == 1:
            values = [changes[keys[0]] for changes in group]
            if all(isinstance(value, int) for value in values):
                values.sort()
            words.append(f"{keys[0]}={any_of(map(format_value, values))}")
        else:
            words += [" and ".join(f"{k}={format_value(v)}" for k, v in c.items()) for c in group]
    return ", or ".join(words)


class _Search:
    """Tries changes of one run and remembers the violations."""

    def __init__(self, run: RunConfig, check: Check) -> None:
        self._run, self._check = run, check
        self._checked: dict[tuple[tuple[str, Any], ...], list[Violation] | None] = {}

    def changes_for(self, violation: Violation, allowed: set[str]) -> Iterator[Changes]:
        """Yields changes after which only `allowed` rules are violated."""
        some = False
        for fix in violation.fixes:
            tried = itertools.islice(fix.changes(), MOST_TRIED)
            working = (changes for changes in tried if self._new(changes, allowed) == [])
            for changes in itertools.islice(working, fix.at_most):
                some = True
                yield changes
        for n_added in range(1, MOST_ADDED + 1):
            if some:
                return
            for fix in violation.fixes:
                budget = iter(range(MOST_COMBINED))  # its own, so that each fix has a chance
                tried = itertools.islice(fix.changes(), MOST_TRIED)
                combined = (self._combined(changes, allowed, n_added, budget) for changes in tried)
                first = next((changes for changes in combined if changes is not None), None)
                if first is not None:
                    some = True
                    yield first

    def _combined(
        self, changes: Changes, allowed: set[str], n_added: int, budget: Iterator[int]
    ) -> Changes | None:
        """Adds up to `n_added` changes that repair what these violate; None if there are none."""
        new = self._new(changes, allowed)
        if new is None or next(budget, None) is None:
            return None
        if not new:
            return changes
        if n_added == 0:
            return None
        for fix in new[0].fixes:
            for other in itertools.islice(fix.changes(), MOST_TRIED):
                if other.keys() & changes.keys():
                    continue  # would overwrite a change
                combined = self._combined(changes | other, allowed, n_added - 1, budget)
                if combined is not None:
                    return combined
        return None

    def _new(self, changes: Changes, allowed: set[str]) -> list[Violation] | None:
        """Returns the violations that are not allowed; None if the changes are invalid."""
        key = tuple(sorted(changes.items()))
        if key not in self._checked:
            run = with_changes(self._run, changes)
            self._checked[key] = None if run is None else self._check(run)
        violations = self._checked[key]
        return None if violations is None else [v for v in violations if v.rule not in allowed]
