"""A fuzzer: random models, layouts and methods together, each trained exactly as one device.

A case follows from its seed. It trains two or three steps with the production steps on real
processes, and its losses, norms, gradients and parameters must be those of one device without any
method that saves memory. Some cases move: they stop in between, save a checkpoint, and go on under
another layout with other methods. In float32, bfloat16 and float16 a case must only not fail.

    python -m tests.multirank.fuzz --seed 17           # that case alone
    python -m tests.multirank.fuzz --seed 17 --shrink  # the shortest case that fails likewise
    python -m tests.multirank.fuzz --cases 400 --from 1000
    python -m tests.multirank.fuzz --case '{...}'      # a case that a failure printed
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gridformer.parallel.registry import describe
from tests.multirank.drawing import Sections, refusals
from tests.multirank.fuzz_case import Case, case_of
from tests.multirank.fuzz_ranks import LIMIT, Found, train
from tests.multirank.pool import RankFailed, WorkerPool

# --------------------------------------------------------------------------- running one


class CaseFailed(AssertionError):  # noqa: N818 - reads as a sentence in pytest.raises
    """A case that failed, hung or is not exact. kind: which of these, to tell failures apart."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(text)


def check_case(pool: WorkerPool, case: Case, folder: Path, how: str = "") -> float:
    """Train a case, and compare it with one device: returns the largest difference.

    how: the command that runs it again. Raises CaseFailed, with the case on one line.
    """
    again = how or f"python -m tests.multirank.fuzz --case '{case.text()}'"
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
    """`hang`, or the exception, of what the pool says."""
    if "did not finish within" in text:
        return "hang"
    return text.strip().splitlines()[-1][:100]


def shrunk(pool: WorkerPool, case: Case, kind: str) -> Case:
    """A case of fewer settings that fails in the same way: each is left out in turn."""

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
    """Cases with one setting less, or one that is smaller."""
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


# --------------------------------------------------------------------------- by hand


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, help="the case of this seed")
    parser.add_argument("--case", help="a case, as a failure printed it")
    parser.add_argument("--cases", type=int, default=1, help="how many, of consecutive seeds")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds: longer is a hang")
    parser.add_argument("--shrink", action="store_true", help="look for the shortest that fails")
    options = parser.parse_args(arguments)
    if options.case:
        cases = [("the case", Case.read(options.case))]
    else:
        first = options.first if options.seed is None else options.seed
        seeds = range(first, first + options.cases)
        cases = [(f"seed {seed}", case_of(seed)) for seed in seeds]
    cases.sort(key=lambda named: named[1].n_processes)  # groups are made anew for another number
    pool, failed, began = WorkerPool(options.timeout), 0, time.monotonic()
    try:
        for name, case in cases:
            try:
                start = time.monotonic()
                with tempfile.TemporaryDirectory() as folder:
                    worst = check_case(pool, case, Path(folder))
                seconds = time.monotonic() - start
                print(f"{name}: {worst:.0e}, {_short(case)}, {seconds:.1f} s", flush=True)
            except CaseFailed as failure:
                failed += 1
                print(f"{name} FAILED ({failure.kind})\n{failure}\n", flush=True)
                if options.shrink:
                    small = shrunk(pool, case, failure.kind)
                    print(f"{name}, shortest: {small.text()}\n", flush=True)
    finally:
        pool.close()
    print(f"{len(cases)} cases, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def _short(case: Case) -> str:
    return " -> ".join(f"{leg.model.family} on {describe(leg.layout)}" for leg in case.legs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
