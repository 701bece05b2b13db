"""Checks that a case trains exactly as one device."""

from __future__ import annotations

from pathlib import Path

from tests.support.fuzz.case import Case
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
