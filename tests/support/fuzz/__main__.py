"""A fuzzer: random models, layouts and methods together, each trained exactly as one device.

A case follows from its seed. It trains two or three steps with the production code on real
processes, and its losses, norms, gradients and parameters must equal those of one device that uses
no memory-saving method. Some cases move: they stop, save a checkpoint, and continue under another
layout with other methods. In float32, bfloat16 and float16 a case only has to run without failing.

    python -m tests.support.fuzz --seed 17  # only this case
    python -m tests.support.fuzz --cases 400 --from 1000
    python -m tests.support.fuzz --case '{...}'      # a case that a failure printed
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from gridformer.parallel.registry import describe_layout
from tests.support.fuzz.case import Case, case_of
from tests.support.fuzz.ranks import CaseFailed, check_case
from tests.support.multirank.pool import WorkerPool


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, help="the case of this seed")
    parser.add_argument("--case", help="a case, as a failure printed it")
    parser.add_argument("--cases", type=int, default=1, help="how many, of consecutive seeds")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds: longer is a hang")
    options = parser.parse_args(arguments)
    if options.case:
        cases = [("the case", Case.read(options.case))]
    else:
        first = options.first if options.seed is None else options.seed
        seeds = range(first, first + options.cases)
        cases = [(f"seed {seed}", case_of(seed)) for seed in seeds]
    # changing the number of processes rebuilds the groups
    cases.sort(key=lambda named: named[1].n_processes)
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
    finally:
        pool.close()
    print(f"{len(cases)} cases, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def _short(case: Case) -> str:
    return " -> ".join(f"{leg.model.family} on {describe_layout(leg.layout)}" for leg in case.legs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
