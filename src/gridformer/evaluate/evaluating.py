"""What each process of `gridformer evaluate` does, and how its results are shown."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gridformer.evaluate.job import Job
from gridformer.evaluate.tasks import Numbers, Options, TaskArgument, measure
from gridformer.parallel.registry import describe_layout

_MANY = 1e9  # from here on, numbers are shown as powers of ten


def evaluate_worker(
    job: Job, asked: Sequence[TaskArgument], options: Options, as_json: bool
) -> None:
    """The entrypoint of every process of `gridformer evaluate`; rank 0 prints the results.

    Args:
        job: The model and its layout.
        asked: The tasks.
        options: Settings of the tasks.
        as_json: Whether to print one JSON object, and no table.
    """
    with job.open() as (trained, rank):
        began = time.perf_counter()
        found = measure(trained, asked, options)
        seconds = time.perf_counter() - began
        if rank == 0 and as_json:
            print(json.dumps(as_dict(job, found, seconds), indent=2))
        elif rank == 0:
            show(job, found, seconds)


def as_dict(job: Job, found: Mapping[str, Numbers], seconds: float) -> dict[str, Any]:
    """Returns the results for --json, which has no numbers that are not finite: they are null.

    Args:
        job: The model and its layout.
        found: The numbers of each task by name, as `measure` returns them.
        seconds: How long the tasks took.
    """
    return {
        "model": job.name or str(job.folder),
        "layout": job.run.layout.model_dump(mode="json", exclude_defaults=True),
        "tasks": {
            task: {name: value if math.isfinite(value) else None for name, value in one.items()}
            for task, one in found.items()
        },
        "seconds": seconds,
    }


def show(job: Job, found: Mapping[str, Numbers], seconds: float) -> None:
    """Prints the results as a table.

    Args:
        job: The model and its layout.
        found: The numbers of each task by name, as `measure` returns them.
        seconds: How long the tasks took.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "measure", box=None, pad_edge=False)
    table.add_column("value", justify="right")
    for task, numbers in found.items():
        for place, (name, value) in enumerate(numbers.items()):
            table.add_row("" if place else task, name, _shown(value))
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{job.name or job.folder} on {describe_layout(job.run.layout)}: {seconds:.1f} s",
        soft_wrap=True,
    )


def _shown(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if abs(value) < _MANY else f"{value:.4e}"
