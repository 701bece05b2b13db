"""The cases of benchmarks.subgraph: shapes, sweeps over heads, and the variants of each.

The shapes are those that SUPER measures (Jain et al. 2021, section VI), reduced to fit two cores:
the original Transformer's base model and T5-large, as blocks of self-attention and feed-forward,
with fewer blocks and shorter sequences. The number of heads goes from 4 to 32 in two ways, as in
the paper's figures:

    work per head fixed     every head is 64 wide, so that h grows with the heads
    total work fixed        h is the model's own, so that heads become narrower
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gridformer.config import LayoutConfig, ModelConfig

Sweep = Literal["per-head", "total"]
HEAD = 64  # the width of a head in both models


@dataclass(frozen=True)
class Shape:
    """A stack of `layers` blocks with hidden size h, f = 4h, and s tokens per sequence.

    If h exceeds 1024 there is only one block, so that all variants fit in memory together.
    """

    name: str
    title: str
    h: int
    s: int
    layers: int


SHAPES = {
    "transformer": Shape("transformer", "Transformer base (h=512)", 512, 64, 2),
    "t5-large": Shape("t5-large", "T5-large (h=1024)", 1024, 64, 1),
    "tiny": Shape("tiny", "tiny, to try the script", 64, 8, 1),
}
HEADS = (4, 8, 16, 32)


@dataclass(frozen=True)
class Case:
    """One measurement, whose variants alternate in one set of processes.

    Attributes:
        each: Samples per process under data parallelism; all variants share this global batch.
    """

    shape: str
    sweep: Sweep
    heads: int
    each: int
    processes: int

    @property
    def hidden(self) -> int:
        shape = SHAPES[self.shape]
        if self.shape == "tiny":
            return 4 * self.heads if self.sweep == "per-head" else shape.h
        return HEAD * self.heads if self.sweep == "per-head" else shape.h

    @property
    def layers(self) -> int:
        return 1 if self.hidden > 1024 else SHAPES[self.shape].layers

    @property
    def key(self) -> str:
        """The same for the case of both sweeps in which they meet: it is measured once."""
        return f"{self.shape}/{self.hidden}/{self.heads}/{self.each}/{self.processes}"

    @property
    def samples(self) -> int:
        return self.each * self.processes

    def model(self) -> ModelConfig:
        shape = SHAPES[self.shape]
        return ModelConfig(
            n_layers=self.layers,
            hidden_size=self.hidden,
            n_heads=self.heads,
            vocab_size=16,
            max_seq_len=shape.s,
        )

    def describe(self) -> str:
        shape = SHAPES[self.shape]
        return (
            f"{shape.name}, {self.heads} heads, {self.sweep} (h={self.hidden} s={shape.s} "
            f"N={self.layers}), {self.each} a process, {self.processes} processes"
        )


@dataclass(frozen=True)
class Variant:
    name: str
    title: str
    layout: LayoutConfig


def variants(processes: int) -> list[Variant]:
    """Return pure data parallelism, and four variants for each g.

    They are D&SP, D&SP with only attention branched, the paper's form of that, and D&SP-cSub. The
    paper's branches begin after the projections: slices of q, k and v enter them, and the heads'
    results are concatenated.
    """
    found = [Variant("dp", "data parallel", LayoutConfig(dp=processes))]
    for g in (g for g in (2, 4, 8) if g <= processes and processes % g == 0):

        def layout(g: int = g, **fields: str) -> LayoutConfig:
            values = {"scheme": "subgraph", "branches": g, "dp": processes // g}
            return LayoutConfig.model_validate({**values, **fields})

        found += [
            Variant(f"dsp-{g}", f"D&SP, g={g}", layout()),
            Variant(
                f"dsp-attention-{g}", f"D&SP of attention, g={g}", layout(feed_forward="common")
            ),
            Variant(
                f"paper-{g}",
                f"D&SP of heads, slice and concat (the paper's), g={g}",
                layout(feed_forward="common", attention="outside"),
            ),
            Variant(f"csub-{g}", f"D&SP-cSub, g={g}", layout(common="first")),
        ]
    return found


def all_cases(processes: int, names: list[str]) -> list[Case]:
    """Return the cases, without repeating equal shapes.

    With fixed work per head, T5-large's heads give the Transformer's shapes, which are measured
    once. 8 processes are for g=8: fixed work per head, h up to 1024.
    """
    sweeps: tuple[Sweep, ...] = ("per-head", "total")
    cases = [
        Case(name, sweep, heads, each, processes)
        for name in names
        for each in (1, 4)
        for sweep in sweeps
        for heads in HEADS
        if not (name == "t5-large" and sweep == "per-head")
    ]
    if processes <= 4:
        return cases
    return [c for c in cases if c.sweep == "per-head" and 8 <= c.heads <= 16]
