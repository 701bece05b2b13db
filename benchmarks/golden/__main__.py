"""Writes numbers that a rewrite of the record must not move, and compares them with earlier ones.

    python -m benchmarks.golden predict --against benchmarks/golden/data/predict.json
    python -m benchmarks.golden cells --against cells.json            # what differs now
    python -m benchmarks.golden cells --out cells.json                # messages, problems, memory
    python -m benchmarks.golden losses --out losses.json              # real processes over gloo

`predict` has the layouts that benchmarks/golden/data/predict.json names: those of
docs/results/planner-speed.md, 60 that were drawn at random, and some of each later option (add a
name with `null`); docs/results/planner.md is compared by making that page anew. `cells` has the
quick cells of the exactness matrix: for each rank the messages and waits in order (without lines of
code), what a trace refuses, and the peak of the complete step on CPUs and GPUs. `losses` trains
these cells for two steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.golden.numbers import cells, losses, predictions

PARTS = {"predict": predictions, "cells": cells, "losses": losses}


def main() -> None:
    """Reads the arguments; see this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="", help="those whose names contain it")
    asked = parser.parse_args()
    before = json.loads(asked.against.read_text()) if asked.against else {}
    found: dict[str, Any] = {}
    for name, make in PARTS[asked.part]():
        if asked.only not in name or (before and name not in before):
            continue
        began = time.perf_counter()
        found[name] = json.loads(json.dumps(make()))
        took = time.perf_counter() - began
        if asked.out:
            asked.out.write_text(json.dumps(found, indent=0))
        if before:
            for line in differences(before[name], found[name]):
                print(f"{name}: {line}", flush=True)
        else:
            print(f"{took:5.1f} s  {name}", flush=True)
    print(f"{len(found)} compared" if before else f"{len(found)} written")


def differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yields what differs; numbers by more than a thousandth."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from differences(before.get(key), now.get(key), f"{path} {key}")
    elif isinstance(before, float | int) and isinstance(now, float | int):
        if abs(now - before) > 1e-3 * abs(before):
            yield f"{path}: {before} -> {now}"
    elif before != now:
        yield f"{path}: {before} -> {now}"


if __name__ == "__main__":
    main()
