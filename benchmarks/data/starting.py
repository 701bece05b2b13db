"""Where `gridformer train` spends its time until the first step is over. Run as a module.

    python -m benchmarks.data.starting RUN.yaml OUT

It trains a run in this process, and prints JSON at the end: for each phase of the start its
processor seconds and its seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

P = ParamSpec("P")
T = TypeVar("T")

PHASES = (
    "Python, and the imports of the command line",
    "reading and checking the run and its data",
    "importing PyTorch",
    "memory, checkpoints, fingerprint of the data",
    "imports of training, process group",
    "model, optimizer, order of the data",
    "evaluation before the first step",
    "first step",
)


class Clock:
    """Adds up the phases of a start, which follow one another."""

    def __init__(self) -> None:
        self.phases: dict[str, tuple[float, float]] = {}
        # Processor time counts from the start of the process, and seconds from about there.
        self._processor, self._wall = 0.0, time.perf_counter() - time.process_time()

    def ends(self, phase: str) -> None:
        """Ends a phase. Only its first end counts."""
        if phase in self.phases:
            return
        processor, wall = time.process_time(), time.perf_counter()
        self.phases[phase] = (processor - self._processor, wall - self._wall)
        self._processor, self._wall = processor, wall

    def after(self, function: Callable[P, T], phase: str) -> Callable[P, T]:
        """Returns a function whose end is the end of a phase."""

        @wraps(function)
        def called(*args: P.args, **options: P.kwargs) -> T:
            found = function(*args, **options)
            self.ends(phase)
            return found

        return called


def main() -> None:
    clock = Clock()
    run, out = sys.argv[1:]
    from gridformer.cli import app
    from gridformer.launch import plan

    clock.ends(PHASES[0])
    plan_checked = plan.plan_checked

    def planned(*args: Any, **options: Any) -> Any:
        import torch  # noqa: F401 (to know how long it takes)

        clock.ends(PHASES[2])
        found = plan_checked(*args, **options)
        clock.ends(PHASES[3])
        from gridformer.launch import run as running
        from gridformer.train.trainer import Trainer

        patches = (
            (running, "init_process_groups", PHASES[4]),
            (Trainer, "__init__", PHASES[5]),
            (Trainer, "_evaluate", PHASES[6]),
            (Trainer, "_start", PHASES[7]),
        )
        for owner, name, phase in patches:
            patch.object(owner, name, clock.after(getattr(owner, name), phase)).start()
        return found

    words = ["gridformer", "train", run, "--out", out]
    with (
        patch.object(plan, "check_run", clock.after(plan.check_run, PHASES[1])),
        patch.object(plan, "plan_checked", planned),
        patch.object(sys, "argv", words),
        patch.object(sys, "stdout", sys.stderr),
    ):
        try:
            app.main()
        except SystemExit as ended:
            if ended.code:
                raise
    print(json.dumps(clock.phases))


if __name__ == "__main__":
    main()
