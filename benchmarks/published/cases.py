"""The emulated machines, and the models and layouts that run on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gridformer.config import RunConfig
from gridformer.parallel.validation import check


@dataclass(frozen=True)
class Machine:
    """Some nodes with as many processes each, on links of `mbit` megabits a second."""

    nodes: int
    each: int
    mbit: float

    @property
    def n(self) -> int:
        return self.nodes * self.each

    def __str__(self) -> str:
        return f"{self.n} processes on {self.nodes} nodes, {self.mbit:g} Mbit/s"


@dataclass(frozen=True)
class Layout:
    """A model on a layout.

    Attributes:
        title: The layout in the tables.
        model: The name of a model in `MODELS`.
        layout: Fields of the layout.
        recompute: `train.recompute`.
        batch: The global batch.
        forward_too: Whether forward passes alone are measured, too.
    """

    title: str
    model: str
    layout: dict[str, Any]
    recompute: str = "none"
    batch: int = 16
    forward_too: bool = False

    def __str__(self) -> str:
        return f"{self.model}: {self.title}"

    def run(self, machine: Machine) -> RunConfig:
        layout = dict(self.layout)
        if layout.get("rows", 1) * layout.get("cols", 1) > 1:
            layout["devices_per_node"] = machine.each
        run = RunConfig.model_validate(
            {
                "model": MODELS[self.model],
                "layout": layout,
                "data": {"path": "."},
                "train": {
                    "global_batch": self.batch,
                    "device": "cpu",
                    "recompute": self.recompute,
                    "steps": 1000,
                },
            }
        )
        check(run)
        if run.layout.n_processes != machine.n:
            raise ValueError(f"{self} has {run.layout.n_processes} processes, not {machine.n}")
        return run


_TINY = {"hidden_size": 128, "n_heads": 16, "vocab_size": 512, "max_seq_len": 64}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {"family": "gpt2", "n_layers": 4, **_TINY},
    "T5": {"family": "t5", "n_layers": 2, **_TINY},
    "Transformer": {"family": "transformer", "n_layers": 2, **_TINY},
    # Large enough that messages take most of the time, as in the paper.
    "stem": {"family": "gpt2", "n_layers": 2, **_TINY, "hidden_size": 256},
}

_GRID = {"scheme": "optimus", "rows": 4, "cols": 4}
_PAPER = {"schedule": "broadcast", "stationary": "output", "keep_gathered": "none"}


def _megatron(cols: int, **more: Any) -> dict[str, Any]:
    return {"scheme": "megatron", "cols": cols, **more}


def _optimus(rows: int, cols: int, **more: Any) -> dict[str, Any]:
    return {"scheme": "optimus", "rows": rows, "cols": cols, **more}


PLAN: dict[Machine, tuple[Layout, ...]] = {
    Machine(4, 4, 100): (
        Layout("megatron 1x16, recomputed", "stem", _megatron(16), "full", 32, True),
        Layout("optimus 4x4 as in the paper, recomputed", "stem", {**_GRID, **_PAPER}, "full", 32,
               True),
        Layout("optimus 4x4, recomputed", "stem", _GRID, "full", 32, True),
        Layout("megatron 1x16", "GPT-2", _megatron(16)),
        Layout("megatron 1x16, sequence parallel", "GPT-2", _megatron(16, sequence_parallel=True)),
        Layout("optimus 4x4", "GPT-2", _GRID),
        Layout("megatron_2d 4x4", "GPT-2", {**_GRID, "scheme": "megatron_2d"}),
        Layout("megatron 1x4, dp 4", "GPT-2", _megatron(4, dp=4)),
        Layout("optimus 2x2, dp 4", "GPT-2", _optimus(2, 2, dp=4)),
        Layout("megatron 1x4, pp 4", "GPT-2", _megatron(4, pp=4, micro_batches=4)),
        Layout("megatron 1x8, dp 2", "GPT-2", _megatron(8, dp=2)),
        Layout("dp 16", "GPT-2", {"dp": 16}),
        Layout("fsdp 16", "GPT-2", {"dp": 16, "dp_mode": "fsdp"}),
    ),
    Machine(4, 2, 100): (
        Layout("megatron 1x8", "T5", _megatron(8)),
        Layout("megatron 1x2, dp 4", "T5", _megatron(2, dp=4)),
        Layout("optimus 2x2, dp 2", "T5", _optimus(2, 2, dp=2)),
        Layout("subgraph, 2 branches, dp 4", "T5",
               {"scheme": "subgraph", "branches": 2, "dp": 4}),
        Layout("dp 8", "T5", {"dp": 8}),
        Layout("megatron 1x8", "GPT-2", _megatron(8)),
        Layout("optimus 2x4", "GPT-2", _optimus(2, 4)),
        Layout("megatron 1x2, pp 4", "GPT-2", _megatron(2, pp=4, micro_batches=4)),
    ),
    Machine(2, 2, 50): (
        Layout("megatron 1x4", "Transformer", _megatron(4)),
        Layout("megatron 1x2, dp 2", "Transformer", _megatron(2, dp=2)),
        Layout("optimus 2x2", "Transformer", _optimus(2, 2)),
        Layout("subgraph, 4 branches", "Transformer", {"scheme": "subgraph", "branches": 4}),
        Layout("subgraph, 2 branches, dp 2", "Transformer",
               {"scheme": "subgraph", "branches": 2, "dp": 2}),
        Layout("dp 4", "Transformer", {"dp": 4}),
    ),
}  # fmt: skip
QUICK: dict[Machine, tuple[Layout, ...]] = {
    Machine(2, 1, 200): (
        Layout("megatron 1x2", "GPT-2", _megatron(2), forward_too=True),
        Layout("dp 2", "GPT-2", {"dp": 2}),
    )
}
