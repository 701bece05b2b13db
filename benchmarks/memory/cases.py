"""The cases of benchmarks.memory: schemes by number of processes, and methods by price."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gridformer.config import DataConfig, LayoutConfig, ModelConfig, RunConfig, TrainConfig

PROCESSES = (1, 4, 9, 16, 36, 64)


@dataclass(frozen=True)
class Scaling:
    """Models that grow with the number of processes, and the budget of each process.

    Attributes:
        widths: Hidden size and heads, by number of processes.
        measured: Numbers of processes that are also run for real.
    """

    name: str
    title: str
    widths: dict[int, tuple[int, int]]
    n_layers: int
    seq_len: int
    vocab: int
    budget: int
    measured: tuple[int, ...] = ()

    def model(self, processes: int) -> ModelConfig:
        hidden, heads = self.widths[processes]
        return ModelConfig(
            name=f"h={hidden}",
            n_layers=self.n_layers,
            hidden_size=hidden,
            n_heads=heads,
            vocab_size=self.vocab,
            max_seq_len=self.seq_len,
        )

    def run(self, layout: LayoutConfig, batch: int) -> RunConfig:
        """Return a run as in the paper, but with AdamW: full recomputation, float32."""
        return RunConfig(
            model=self.model(layout.n_processes),
            data=DataConfig(path=Path("none")),
            layout=layout,
            train=TrainConfig(global_batch=batch, recompute="full", device="cpu"),
        )


# The paper's setting: 16 GB per device, h = 1024 sqrt(p), N = 24, s = 512, full recomputation. With
# 9 heads or columns, h must divide by 9, so h = 3024 there, and 36 has the paper's h = 6120.
PAPER = Scaling(
    "paper",
    "as in the paper: h = 1024 sqrt(p) (3024 at 9, 6120 at 36), N = 24, s = 512, v = 50304, "
    "16 GB a process, estimated",
    {
        1: (1024, 16),
        4: (2048, 32),
        9: (3024, 54),
        16: (4096, 64),
        36: (6120, 72),
        64: (8192, 128),
    },
    24,
    512,
    50304,
    16 * 10**9,
)
SMALL = Scaling(
    "small",
    "small: h = 64 sqrt(p), N = 4, s = 64, v = 1024, 12 MB a process; up to 9 processes measured",
    {1: (64, 8), 4: (128, 16), 9: (216, 27), 16: (256, 32), 36: (360, 36), 64: (512, 64)},
    4,
    64,
    1024,
    12 * 10**6,
    (1, 4, 9),
)
SCALINGS = {scaling.name: scaling for scaling in (PAPER, SMALL)}


OPTIMUS = "optimus, auto"
FSDP = "FSDP"
# Megatron on some columns and FSDP over the rest; the benchmark shows the best number of columns.
HYBRID = "megatron 1xc, sequence parallel, x FSDP"
# Layouts compared at the same global batch: those that shard weights and activations.
AT_EQUAL_BATCH = ("megatron, sequence parallel", "megatron 2-D", OPTIMUS, FSDP, HYBRID)


def family(title: str) -> str:
    """Return a layout's row in the tables: hybrids share one, whatever their columns."""
    return HYBRID if title.endswith("x FSDP") else title


def columns(title: str) -> int:
    """Return Megatron's columns in a hybrid's title."""
    return int(title.removeprefix("megatron 1x").partition(",")[0])


def schemes(processes: int) -> dict[str, LayoutConfig]:
    """Return layouts by title, all of which use every process."""
    if processes == 1:
        return {"one device": LayoutConfig()}
    side = round(processes**0.5)
    assert side * side == processes, "a square grid"
    grid: dict[str, Any] = {"scheme": "optimus", "rows": side, "cols": side}
    megatron: dict[str, Any] = {"scheme": "megatron", "cols": processes}
    branches: dict[str, Any] = {"scheme": "subgraph", "branches": processes}
    found = {
        "megatron": megatron,
        "megatron, sequence parallel": {**megatron, "sequence_parallel": True},
        "megatron 2-D": {**grid, "scheme": "megatron_2d"},
        OPTIMUS: grid,
        "optimus, pipelined": {**grid, "schedule": "pipelined"},
        "optimus, broadcast (the paper's)": {**grid, "schedule": "broadcast"},
        "D&SP": branches,
        "D&SP-cSub": {**branches, "common": "first"},
        FSDP: {"dp": processes, "dp_mode": "fsdp"},
    }
    for c in range(2, processes):
        if processes % c == 0:
            replicas = {"dp": processes // c, "dp_mode": "fsdp"}
            found[HYBRID.replace("1xc", f"1x{c}")] = {
                **megatron,
                "cols": c,
                "sequence_parallel": True,
                **replicas,
            }
    return {title: LayoutConfig(**layout) for title, layout in found.items()}


# The price of each method in time; see price.py. By title, the settings that differ from the first.
METHODS: dict[str, dict[str, Any]] = {
    "nothing saved": {"loss_chunk_tokens": 0},
    "loss in parts of 256 tokens": {"loss_chunk_tokens": 256},
    "recompute: selective": {"loss_chunk_tokens": 0, "recompute": "selective"},
    "recompute: full": {"loss_chunk_tokens": 0, "recompute": "full"},
    "clip_by: layer": {"loss_chunk_tokens": 0, "clip_by": "layer"},
    "update: in_backward": {"loss_chunk_tokens": 0, "clip_by": "layer", "update": "in_backward"},
    "offload: optimizer": {"loss_chunk_tokens": 0, "offload": "optimizer"},
    "all of them": {
        "loss_chunk_tokens": 256,
        "recompute": "full",
        "clip_by": "layer",
        "update": "in_backward",
        "offload": "optimizer",
    },
}
PRICE_LAYOUTS = {
    "one device": LayoutConfig(),
    "optimus 2x2": LayoutConfig(scheme="optimus", rows=2, cols=2),
    "megatron 1x2, dp=2": LayoutConfig(scheme="megatron", cols=2, dp=2),
}
PRICE_MODEL = ModelConfig(
    name="h=512",
    n_layers=4,
    hidden_size=512,
    n_heads=8,
    vocab_size=8192,
    max_seq_len=128,
    attention_dropout=0.1,
)
PRICE_BATCH = 16
