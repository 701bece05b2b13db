"""Predicts a step of decoding: one token of each sequence, on the layouts of a replica's devices.

    python -m benchmarks.planner.decoding --out docs/results/decoding.md

A forward pass of a micro-batch with one token per sequence is predicted from its trace, as the
difference between a batch of three micro-batches and one of two: weights are then cast before, as
`gridformer generate` casts them once. What attention reads of the keys and values of earlier tokens
is added, by the bandwidth of the device. Nothing here runs on a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common.machine import command_line
from benchmarks.common.page import write_page
from gridformer.cluster.costs import Costs
from gridformer.cluster.file import Cluster, load_cluster
from gridformer.config import RunConfig, parse_run
from gridformer.parallel.auto.products import blocks_of
from gridformer.parallel.registry import describe_layout
from gridformer.parallel.validation import check_layout
from gridformer.plan.predict import predict

MODEL, CLUSTER, SEQUENCES, CONTEXT = "llama-3.1-405b", "gb200-nvl72", 16, 4096
STATIONARY: dict[str, Any] = {"scheme": "optimus", "stationary": "weight"}
LAYOUTS: list[dict[str, Any]] = [
    {"scheme": "megatron", "cols": 8, "dp": 8},
    {"scheme": "megatron", "cols": 64},
    {"scheme": "optimus", "rows": 8, "cols": 8},
    *({**STATIONARY, "rows": 64 // cols, "cols": cols} for cols in (4, 8, 16)),
    {**STATIONARY, "rows": 4, "cols": 2, "dp": 8},
]


@dataclass(frozen=True)
class Step:
    """A predicted step of decoding, in milliseconds."""

    name: str
    products: float
    messages: float
    other: float
    cache: float
    launches: int

    @property
    def device(self) -> float:
        return self.products + self.messages + self.other + self.cache


def step_of(layout: dict[str, Any], cluster: Cluster) -> Step:
    both = [predict(run_of(layout, m), cluster, training=False, memory=False) for m in (2, 3)]
    few, more = (one.seconds_by_kind() for one in both)
    each = {kind: 1e3 * (seconds - few.get(kind, 0.0)) for kind, seconds in more.items()}
    messages = sum(value for kind, value in each.items() if kind.startswith("messages"))
    run = run_of(layout, 1)
    devices = run.layout.rows * run.layout.cols
    heads = run.model.kv_heads / blocks_of(run.model.kv_heads, devices)
    if run.layout.scheme == "optimus" and run.layout.stationary != "weight":
        heads = run.model.kv_heads / run.layout.cols / run.layout.rows  # of its rows' sequences
    sequences = SEQUENCES / run.layout.dp
    n_bytes = 2 * 2 * CONTEXT * heads * run.model.head_width * sequences * run.model.n_layers
    cache = 1e3 * Costs(cluster.for_processes(run.layout.n_processes)).moved_s(n_bytes)
    other = each.get("memory-bound", 0.0) + each.get("attention", 0.0)
    launches = both[1].launches - both[0].launches
    name = describe_layout(run.layout)
    return Step(name, each["products"], messages, other, cache, round(launches))


def run_of(layout: dict[str, Any], micro_batches: int) -> RunConfig:
    run = parse_run(
        {
            "model": MODEL,
            "layout": {**layout, "micro_batches": micro_batches},
            "data": {"path": ".", "seq_len": 1},
            "train": {
                "global_batch": SEQUENCES * micro_batches,
                "dtype": "bfloat16",
                "compile": False,
            },
        }
    )
    check_layout(run)
    return run


def main(out: Annotated[Path | None, typer.Option()] = None) -> None:
    cluster = load_cluster(CLUSTER)
    lines = [
        "| layout | products | messages | keys and values | other kernels | a step | launches |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for layout in LAYOUTS:
        one = step_of(layout, cluster)
        cells = (one.products, one.messages, one.cache, one.other, one.device)
        numbers = " | ".join(f"{value:.1f}" for value in cells)
        lines.append(f"| {one.name} | {numbers} | {one.launches:,} |")
        typer.echo(lines[-1], err=True)
    about = (
        f"Milliseconds of a device for one token of each of {SEQUENCES} sequences, after "
        f"{CONTEXT:,} tokens each: {MODEL} in bfloat16 on 64 devices of {CLUSTER}. Predicted, not "
        "measured. Messages are rings, whose latency grows with the devices of an axis. Launches "
        "are those of a host that replays no graph, which no column counts."
    )
    how = f"Written by `{command_line('benchmarks.planner.decoding')}`."
    write_page(["# Decoding on a grid, predicted", about, "\n".join(lines), how], out)


if __name__ == "__main__":
    typer.run(main)
