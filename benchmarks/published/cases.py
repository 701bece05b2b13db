"""An emulated machine, and a model on a layout that runs on it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from gridformer.config import RunConfig
from gridformer.parallel.validation import check_layout


@dataclass(frozen=True)
class Machine:
    """Some nodes with as many processes each, on links of `mbit` megabits a second.

    Attributes:
        nodes: The number of nodes. One node has no link.
        each: Processes in a node.
        mbit: Megabits a second of the link of a node; 0 for one node, which needs none.
        racks: The number of racks, each of which has the same number of nodes.
        trunk_mbit: Megabits a second of the link between a rack and the others.
        apart: Whether each process has a part of the cores of its own, as a device has, which it
            lends to no other.
    """

    nodes: int
    each: int
    mbit: float
    racks: int = 1
    trunk_mbit: float = 0.0
    apart: bool = False

    @property
    def n(self) -> int:
        return self.nodes * self.each

    @property
    def file_name(self) -> str:
        """A name for what is measured there."""
        name = f"{self.nodes}x{self.each}-{self.mbit:g}" + "-apart" * self.apart
        return f"{name}-racks{self.racks}-{self.trunk_mbit:g}" if self.racks > 1 else name

    def __str__(self) -> str:
        if self.nodes == 1:
            return f"{self.n} processes on one node"
        name = f"{self.n} processes on {self.nodes} nodes, {self.mbit:g} Mbit/s"
        if self.racks > 1:
            name += f", {self.racks} racks, {self.trunk_mbit:g} Mbit/s between them"
        return name


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
        nodes_known: Whether the layout knows which ranks share a node, so that blocks of a grid are
            placed on nodes.
        racks_known: The same for nodes in racks.
    """

    title: str
    model: str
    layout: dict[str, Any]
    recompute: str = "none"
    batch: int = 16
    forward_too: bool = False
    nodes_known: bool = True
    racks_known: bool = True

    def __str__(self) -> str:
        return f"{self.model}: {self.title}"

    def key(self, machine: Machine) -> str:
        """Returns a name that differs if anything about the run differs."""
        run = self.run(machine).model_dump_json()
        return f"{self} {sha256(run.encode()).hexdigest()[:12]}"

    def run(self, machine: Machine) -> RunConfig:
        layout = dict(self.layout)
        if layout.get("rows", 1) * layout.get("cols", 1) > 1 and self.nodes_known:
            layout["devices_per_node"] = machine.each
            if machine.racks > 1 and self.racks_known:
                layout["nodes_per_rack"] = machine.nodes // machine.racks
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
        check_layout(run)
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
    # With a layer for each of eight stages.
    "deep": {"family": "gpt2", "n_layers": 8, **_TINY},
}
