"""torchtitan's eager runs of Llama 3.1 8B on H100, and what of their time the machine explains.

Published are tokens/s a GPU on 8 and 128 GPUs: FSDP, two sequences of 8,192 tokens a GPU, bfloat16,
and activation checkpointing by operator. That keeps attention and every second product of a layer,
and repeats k, the attention's projection and one product up of the MLP: half of the products that
`recompute: full` repeats. gridformer has no such mode, so its time is put together from those of
`none` and `full`. Runs with torch.compile or Float8 are left out: the planner knows neither.
"""

from __future__ import annotations

from itertools import pairwise

from benchmarks.planner.fitting import with_fitted
from benchmarks.planner.pricing import RecordedRow, price, record
from benchmarks.planner.rows import DATA, H100, Row
from gridformer.cluster.file import Cluster, load_cluster
from gridformer.config import parse_run, shipped_model

MACHINE = DATA / "grand-teton-h100.yaml"
SOURCE = (
    "https://github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 "
    "and 3, and the code of commit 9dec370"
)
PUBLISHED = {8: 5762.0, 128: 5605.0}  # tokens/s a GPU by GPUs
BATCH, SEQ_LEN = 2, 8192  # of a GPU
LATER = 0.78  # the fraction of the peak that pytorch/ao has for products since March 2025


class Traced:
    """The published run on n GPUs, with the modes of recomputation on either side of its own."""

    def __init__(self, n: int) -> None:
        self.none, self.full = recorded(n, "none"), recorded(n, "full")

    def rate(self, cluster: Cluster) -> float:
        """Returns the tokens/s a GPU with the published recomputation."""
        none, full = price(self.none, cluster), price(self.full, cluster)
        products = (full.parts.products - none.parts.products) / 2
        seconds = none.step_s + products + full.parts.memory_bound - none.parts.memory_bound
        return BATCH * SEQ_LEN / seconds


def recorded(n: int, recompute: str) -> RecordedRow:
    """Traces the published run on n GPUs with one of gridformer's modes of recomputation."""
    model = {**shipped_model("llama-3.1-8b"), "max_seq_len": SEQ_LEN}
    layout = {"dp": n, "dp_mode": "fsdp", "devices_per_node": 8}
    train = {"global_batch": BATCH * n, "dtype": "bfloat16", "recompute": recompute}
    run = parse_run({"model": model, "layout": layout, "train": train, "data": {"path": "none"}})
    name, published = f"on {n}", PUBLISHED[n]
    return record(Row(name, str(MACHINE), published, "s/iteration", run, SOURCE))


def lines() -> list[str]:
    """Returns the table from dgx-h100 to the published machine, and what explains how much."""
    dgx, theirs = load_cluster(H100), load_cluster(MACHINE)
    there = dgx.number("memory_efficiency")
    clusters = {
        "dgx-h100, recomputation as published": dgx,
        f"dgx-h100 with memory of 2.4 TB/s, of which {there:g} is reached as there": (
            dgx.model_copy(update={"device": theirs.device})
        ),
        f"**{MACHINE.stem}**: products at 0.6 of the peak, memory at 0.92 of 2.4 TB/s": theirs,
        f"the same, memory at {there:g} of it": with_fitted(theirs, {"memory_efficiency": there}),
        f"the same as **{MACHINE.stem}**, products at {LATER:g} of the peak": (
            with_fitted(theirs, {"product_efficiency": LATER})
        ),
    }
    rates = {
        "published, eager": PUBLISHED,
        "dgx-h100, `recompute: selective`, as `gridformer predict` has it": {
            n: BATCH * SEQ_LEN / price(recorded(n, "selective"), dgx).step_s for n in PUBLISHED
        },
    }
    several = {n: Traced(n) for n in PUBLISHED}
    for name, cluster in clusters.items():
        rates[name] = {n: one.rate(cluster) for n, one in several.items()}
    rows = []
    for name, found in rates.items():
        cells = [f"{rate:,.0f} | {rate / PUBLISHED[n] - 1:+.0%}" for n, rate in found.items()]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    published, before, same, _, after, *_ = (BATCH * SEQ_LEN / one[8] for one in rates.values())
    steps = [(b - a) / (published - before) for a, b in pairwise((before, same, after, published))]
    return [
        "| tokens/s a GPU | 8 H100 | error | 128 H100 | error |",
        "|---|---:|---:|---:|---:|",
        *rows,
        "",
        f"On 8 GPUs a step took {published:.2f} s, and {before:.2f} s are predicted with dgx-h100. "
        f"Recomputation as published explains {steps[0]:.0%} of the difference and the machine "
        f"{steps[1]:.0%}; {steps[2]:.0%} are not explained. Source: {SOURCE}.",
    ]
