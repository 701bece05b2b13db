"""Checks that a case trains exactly as one device, and shrinks a failing case."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tests.support.fuzz.case import Case
from tests.support.fuzz.drawing import Sections, refusals
from tests.support.fuzz.ranks import LIMIT, Found, train
from tests.support.multirank.pool import RankFailed, WorkerPool


class CaseFailed(AssertionError):  # noqa: N818 - reads as a sentence in pytest.raises
    """A case that failed, hung or is not exact.

    `kind` says which of these happened, so that failures can be told apart.
    """

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(text)


def check_case(pool: WorkerPool, case: Case, folder: Path, how: str = "") -> float:
    """Train a case, compare it with one device and return the largest difference.

    Args:
        how: The command that runs the case again, for the message.

    Raises:
        CaseFailed: The case failed; the message holds the case on one line.
    """
    again = how or f"python -m tests.support.fuzz --case '{case.text()}'"
    header = f"to run it again: {again}\nthe case: {case.text()}\n"
    worst = 0.0
    for number, leg in enumerate(case.legs):
        try:
            found: list[Found] = pool.run(
                leg.layout.n_processes, train, case.text(), number, str(folder)
            )
        except RankFailed as failure:
            text = str(failure)
            raise CaseFailed(_kind(text), f"{header}{text}") from None
        for rank, one in enumerate(found):
            wrong = {name: value for name, value in one.items() if not value <= LIMIT[name]}
            if wrong:
                words = f"leg {number}, rank {rank}: {wrong}"
                raise CaseFailed("differs", f"{header}differs from one device: {words}")
            exact = [value for name, value in one.items() if name != "loose"]
            worst = max(worst, *exact, 0.0)
    return worst


def _kind(text: str) -> str:
    """Return `hang`, or the exception's name, from the pool's message."""
    if "did not finish within" in text:
        return "hang"
    return text.strip().splitlines()[-1][:100]


def shrunk(pool: WorkerPool, case: Case, kind: str) -> Case:
    """Leave out each setting in turn, and return a smaller case that fails in the same way."""

    def still(smaller: Case) -> bool:
        try:
            if any(refusals(sections) for sections in (smaller.run, smaller.after)):
                return False
            with tempfile.TemporaryDirectory() as folder:
                check_case(pool, smaller, Path(folder))
        except CaseFailed as failure:
            return failure.kind.split(":")[0] == kind.split(":")[0]
        except ValidationError:
            return False
        return False

    changed = True
    while changed:
        changed = False
        for smaller in _smaller(case):
            if still(smaller):
                case, changed = smaller, True
                print(f"still fails: {case.text()}", flush=True)
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Yield cases with one setting fewer, or with a smaller value for one."""
    if case.stop:
        yield Case(case.run, case.batch, case.steps, 0, {})
        yield Case(case.after, case.batch, case.steps, 0, {})
    if case.steps > 1 and not case.stop:
        yield Case(case.run, case.batch, 1, 0, {})
    for name, value in case.batch.items():
        if value:
            yield Case(case.run, {**case.batch, name: 0.0}, case.steps, case.stop, case.moved)
    for part in ("run", "moved"):
        sections: Sections = getattr(case, part)
        for section, values in sections.items():
            for key, value in values.items():
                for less in ("drop", *(n for n in (1, 2) if isinstance(value, int) and n < value)):
                    changed = copy.deepcopy(sections)
                    if less == "drop":
                        del changed[section][key]
                    else:
                        changed[section][key] = less
                    values_of: dict[str, Any] = {**asdict(case), part: changed}
                    yield Case(**values_of)
