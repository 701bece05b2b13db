"""How long the parts of starting on a corpus take, and making its batches. Run as a module.

    python -m benchmarks.data.reading RUN.yaml BATCHES

It prints JSON: seconds of each part, processor seconds of all parts, and both of every batch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from gridformer.config import load_run
from gridformer.data import RunData, open_training, resolve
from gridformer.data.run_data import fingerprint

T = TypeVar("T")


def main() -> None:
    parts: dict[str, float] = {}

    def timed(name: str, do: Callable[[], T]) -> T:
        began = time.perf_counter()
        found = do()
        parts[name] = time.perf_counter() - began
        return found

    run = load_run(sys.argv[1])
    started = time.process_time()
    data = timed("open", lambda: RunData.open(run.data))
    run = timed("check", lambda: resolve(run, data))
    timed("fingerprint", lambda: fingerprint(data))
    batches = timed("order", lambda: open_training(run, data))
    timed("first batch", lambda: batches.batch(0))
    used_by_all = time.process_time() - started
    wall, processor = [], []
    for step in range(1, 1 + int(sys.argv[2])):
        began, used = time.perf_counter(), time.thread_time()
        batches.batch(step)
        wall.append(time.perf_counter() - began)
        processor.append(time.thread_time() - used)
    found = {"parts": parts, "processor_s": used_by_all, "wall": wall, "processor": processor}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
