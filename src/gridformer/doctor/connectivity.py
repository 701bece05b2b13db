"""The worker of `gridformer doctor`: forms a grid of processes, sums along it, and times that."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridformer.config import LayoutConfig, divisors

if TYPE_CHECKING:
    import torch

BIG_BYTES = 16 * 2**20


def grid(n_processes: int) -> LayoutConfig:
    """Returns the layout of the most square grid of n processes: 2x2 for 4, 2x3 for 6."""
    rows = max(d for d in divisors(n_processes) if d * d <= n_processes)
    return LayoutConfig(scheme="optimus", rows=rows, cols=n_processes // rows)


def probe(n_processes: int, timeout_s: float, answer: Path) -> None:
    """The entrypoint of each process: checks sums over the grid and times all-reduces.

    Rank 0 writes the results to a JSON file with the keys `why` (device and backend in words),
    `wrong` (sentences, empty if every sum was right), `small_s` and `big_s` (median seconds of an
    all-reduce of 4 bytes and of BIG_BYTES).

    Args:
        n_processes: Number of processes.
        timeout_s: Timeout of a collective in seconds.
        answer: Path of the JSON file.

    Raises:
        UserError: The processes do not fit this machine; see `init_process_groups`.
    """
    import torch

    from gridformer.comm import all_reduce
    from gridformer.mesh.groups import objects_group
    from gridformer.mesh.process_group import close_process_groups, init_process_groups
    from gridformer.parallel.axes import build_axes

    world = init_process_groups("auto", n_processes, timeout_s)
    axes = build_axes(grid(n_processes), world.device.type)
    mine = torch.zeros(n_processes, dtype=torch.float64, device=world.device)
    mine[world.rank] = world.rank + 1
    wrong = []
    # Over NCCL, checkpoints send objects over gloo, which needs connections of its own.
    objects = replace(axes.world, group=objects_group())
    for axis, on in ((axes.row, mine), (axes.col, mine), (axes.world, mine), (objects, mine.cpu())):
        got = all_reduce(on.clone(), axis)
        step = {"row": axes.col.size, "col": 1, "world": 1}[axis.name]
        first = world.rank - axis.index * step
        members = {first + i * step for i in range(axis.size)}
        expected = [r + 1.0 if r in members else 0.0 for r in range(n_processes)]
        if got.tolist() != expected:
            wrong.append(f"rank {world.rank} along {axis.name}: {got.tolist()}, not {expected}")

    def seconds(n_bytes: int, repeats: int) -> float:
        x = torch.ones(n_bytes // 4, device=world.device)
        times = []
        for _ in range(repeats):
            x.fill_(1.0)
            _wait_for_gpu(world.device)
            start = time.perf_counter()
            all_reduce(x, axes.world)
            _wait_for_gpu(world.device)
            times.append(time.perf_counter() - start)
        return statistics.median(times[repeats // 4 :])  # the first ones set up connections

    small_s, big_s = seconds(4, 40), seconds(BIG_BYTES, 12)
    n_wrong = int(all_reduce(torch.tensor(len(wrong), device=world.device), axes.world))
    if n_wrong and not wrong:
        wrong = [f"{n_wrong} sums on other ranks"]
    if world.rank == 0:
        found: dict[str, Any] = {"why": world.why, "wrong": wrong}
        answer.write_text(json.dumps({**found, "small_s": small_s, "big_s": big_s}))
    close_process_groups()


def _wait_for_gpu(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
