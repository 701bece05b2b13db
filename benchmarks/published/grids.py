"""The best grid and the best layout without one that the planner finds, on an emulated cluster.

    python -m benchmarks.published.grids --keep FOLDER --out docs/results/published-grids.md

Sequences are long and fewer than processes. The processes measure the machine as `gridformer
calibrate` does, and the search of `gridformer plan` goes through all grids, and through all other
layouts. Then the same processes run a step of each of the two in turn, so that what else the
machine does strikes both. It needs what `python -m benchmarks.published` needs, and control groups
that limit processors; nothing else should run meanwhile. It takes about 10 minutes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common.machine import command_line, describe_machine
from benchmarks.common.page import write_page
from benchmarks.predicted.report import Row, error_lines
from benchmarks.predicted.steps import stepping
from benchmarks.published.cases import Machine
from benchmarks.published.emulate import cluster_of, with_cores
from benchmarks.published.measuring import Place, measured, network_of
from benchmarks.published.namespaces import enter
from gridformer import comm
from gridformer.calibrate.machine import write_cluster
from gridformer.cluster.file import load_cluster
from gridformer.config import RunConfig, parse_run
from gridformer.launch import launch
from gridformer.mesh.axes import Axis
from gridformer.mesh.process_group import close_process_groups, init_process_groups
from gridformer.plan.predict import predict
from gridformer.plan.search import Search
from gridformer.plan.trace_candidates import Tracing
from gridformer.utils.process import n_cores

MACHINE = Machine(4, 4, 100, apart=True)
ATTENTION = (
    *((1, 2, 1024, 1024, 16, True), (1, 1, 2048, 2048, 16, True)),
    # Where rows divide sequences, a mask of some queries hides no key from the kernel.
    *((1, 2, 256, 4096, 16, False), (1, 2, 256, 1024, 16, False), (1, 8, 256, 512, 16, False)),
)
PAIRS, WARM_UPS = 7, 2
TRACED, LIMIT_S = 20, 60.0  # layouts of a search, and seconds of the processor
_SIZES = {"n_layers": 4, "hidden_size": 128, "n_heads": 8, "vocab_size": 512}
_LLAMA, _GPT2 = {"family": "llama", "n_kv_heads": 2, **_SIZES}, {"family": "gpt2", **_SIZES}
CASES = {  # a model, sequences, and their tokens
    "llama, 1 x 4,096": (_LLAMA, 1, 4096),
    "llama, 4 x 2,048": (_LLAMA, 4, 2048),
    "GPT-2, 1 x 4,096": (_GPT2, 1, 4096),
}


class _Part(Search):
    """A search among grids with several rows, or among layouts of the other schemes."""

    grids = False

    def arrangements(self) -> Iterator[RunConfig]:
        for run in super().arrangements():
            grid = run.layout.scheme in ("optimus", "megatron_2d")
            if grid == self.grids and (run.layout.rows > 1 or not grid):
                yield run


@dataclass(frozen=True)
class Best:
    """The best layout of a search, in words, and the seconds of its step: as predicted, and as
    predicted if processes shared the cores, so that one that waits lent its part to others.
    """

    run: RunConfig
    name: str
    step_s: float
    shared_s: float


def best_of(case: str, file: Path, grids: bool) -> Best:
    """Searches in this process; see `gridformer.plan.predict.predict`."""
    model, sequences, tokens = CASES[case]
    data: dict[str, Any] = {
        "model": {**model, "max_seq_len": tokens},
        "data": {"path": "."},
        "train": {"device": "cpu", "global_batch": sequences, "steps": 1000},
    }
    cluster = load_cluster(str(file))
    search = _Part(parse_run(data), cluster, MACHINE.n, named=str(file))
    search.grids = grids
    tracing = Tracing(search, TRACED)
    tracing.run(LIMIT_S)
    best = tracing.result.layouts[0]
    shared = predict(best.run, with_cores(cluster, n_cores()), memory=False)
    return Best(best.run, best.name, best.step_s, shared.step_s)


def worker(pairs: Sequence[tuple[RunConfig, RunConfig]], out: Path, places: list[Place]) -> None:
    """The entrypoint of every process; rank 0 writes the seconds of the steps of each pair."""
    enter(*places[int(os.environ["RANK"])])
    world = init_process_groups("cpu", MACHINE.n, 600.0)
    everyone, found = (Axis("world", MACHINE.n, world.rank),), []
    for pair in pairs:
        steps, times = [stepping(run, world) for run in pair], []
        for _ in range(WARM_UPS + PAIRS):
            for step in steps:
                comm.barrier(everyone)
                began = time.perf_counter()
                step()
                comm.barrier(everyone)
                times.append(time.perf_counter() - began)
        found.append(times[2 * WARM_UPS :])
        if world.rank == 0:
            print(f"  {[round(one, 2) for one in times]} s", file=sys.stderr, flush=True)
            out.write_text(json.dumps(found), encoding="utf-8")
    close_process_groups()


def page(bests: Sequence[tuple[Best, Best]], times: Sequence[Sequence[float]]) -> list[str]:
    """Returns the page after its first paragraphs: what wins, a table, and the errors."""
    wins, rows = [], []
    lines = [
        "| | layout | predicted, s | measured, s (quartiles) | grid is faster by: predicted | "
        "measured (quartiles) | predicted if they shared cores |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for case, pair, seconds in zip(CASES, bests, times):
        sides = seconds[::2], seconds[1::2]
        ratios = [plain / grid for plain, grid in zip(*sides)]
        middle = statistics.median(ratios)
        first, last = pair if middle < 1 else pair[::-1]
        wins.append(
            f"- {case}: {first.name} is {max(middle, 1 / middle):.2f} times as fast as {last.name}."
        )
        for i, (best, some) in enumerate(zip(pair, sides)):
            rows.append(Row(f"{case}: {best.name}", best.step_s, statistics.median(some)))
            cells = [case, best.name, f"{best.step_s:.2f}", _quartiles(some)]
            if i:
                plain = pair[0]
                cells += [f"{plain.step_s / best.step_s:.2f}", _quartiles(ratios)]
                cells += [f"{plain.shared_s / best.shared_s:.2f}"]
            lines.append(f"| {' | '.join(cells + [''] * (7 - len(cells)))} |")
    return ["\n".join(wins), "\n".join(lines), error_lines(rows)]


def _quartiles(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}, {high:.2f})"


def main(
    out: Annotated[Path | None, typer.Option(help="The page to write; else it is printed.")] = None,
    keep: Annotated[Path | None, typer.Option(help="A folder for what calibration finds.")] = None,
) -> None:
    """Search, measure what is best, and write the page."""
    began = time.monotonic()

    def tell(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="gridformer-grids-") as folder:
        file, results = Path(folder) / "emulated.yaml", Path(folder) / "times.json"
        tell("calibrating")
        found, _ = measured(MACHINE, (), keep or Path(folder), ATTENTION)
        write_cluster(cluster_of(MACHINE, found), file)
        bests = []
        for case in CASES:
            tell(f"searching: {case}")
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                plain, grid = (
                    pool.submit(best_of, case, file, grids).result() for grids in (False, True)
                )
            tell(f"{plain.name} {plain.step_s:.2f} s, {grid.name} {grid.step_s:.2f} s")
            bests.append((plain, grid))
        tell("measuring")
        with network_of(MACHINE) as places:
            launch(worker, ([(a.run, b.run) for a, b in bests], results, places), MACHINE.n)
        times = json.loads(results.read_text(encoding="utf-8"))
    about = describe_machine("benchmarks.published.grids")
    head = (
        f"{about['date']}: {about['cpu']}, {about['cores']} cores, torch {about['torch']}, gloo, "
        f"commit {about['commit'] or 'unknown'}: `{command_line('benchmarks.published.grids')}`"
        f"{about['busy']}."
    )
    write_page(
        ["# Grids for long sequences on an emulated cluster", head, *page(bests, times), _HOW], out
    )


_HOW = f"""\
Network namespaces are {MACHINE.nodes} nodes of {MACHINE.each} processes, with a link of
{MACHINE.mbit:g} Mbit/s a node. Control groups give each process an equal part of 80% of the cores.
One that waits lends its part to no other, like a device: if it did, a pipeline with one micro-batch
would lose no time of the processor, and the last column is what is predicted then for the same
layouts. Processes, models, messages (gloo over TCP) and optimizer steps are real.

The models have {_SIZES["n_layers"]} layers of h={_SIZES["hidden_size"]}. So 4,096 tokens are 32
times as many as the model is wide, as 131,072 are for llama-3.1-8b. A case is called by its
sequences and their tokens. The planner knows a cluster file, for which the same processes measured
the machine, and no measured step. It searched twice: among grids with several rows (`megatron_2d`
and `optimus`, rows over the batch or the sequence, with any pipeline and replicas of any mode), and
among all layouts of other schemes (Megatron with and without sequence parallelism, data
parallelism, ZeRO-1, FSDP, sub-graphs, pipelines). The fastest layout of each, as predicted, is
measured. Seconds are from one barrier to the next, around one step. Steps of the two layouts take
turns: {PAIRS} pairs after {WARM_UPS}. A ratio is the median of the ratios of pairs."""


if __name__ == "__main__":
    typer.run(main)
