"""The cases of `benchmarks.schemes`: shapes, numbers of processes, and recomputation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gridformer.config import ModelConfig


@dataclass(frozen=True)
class Size:
    """The shape of a stack of N = `layers` transformer blocks with n heads and input [b, s, h]."""

    b: int
    s: int
    h: int
    n: int
    layers: int

    def __str__(self) -> str:
        return f"b={self.b} s={self.s} h={self.h} n={self.n} N={self.layers}"

    def model(self) -> ModelConfig:
        """Return a GPT-2 with these blocks; its embedding and head are tiny and not measured."""
        return ModelConfig(
            n_layers=self.layers,
            hidden_size=self.h,
            n_heads=self.n,
            vocab_size=16,
            max_seq_len=self.s,
        )


# Keyed by name and number of processes. The shapes for 1 and 4 processes are the ones that all our
# tables show. With 9 processes, every dimension that a 3x3 or a 1x9 layout shards must divide by 3
# or 9: these are the closest such shapes with heads of 64. With 16 processes, a 1x16 layout needs a
# multiple of 16 heads, so `small` has 16 heads of 32 there.
SIZES: dict[str, dict[int, Size]] = {
    "small": {
        1: Size(8, 128, 512, 8, 4),
        4: Size(8, 128, 512, 8, 4),
        9: Size(9, 126, 576, 9, 4),
        16: Size(8, 128, 512, 16, 4),
    },
    "large": {
        1: Size(16, 128, 1024, 16, 1),
        4: Size(16, 128, 1024, 16, 1),
        9: Size(15, 126, 1152, 18, 1),
        16: Size(16, 128, 1024, 16, 1),
    },
    "tiny": {  # for tests of the benchmark itself: --quick
        1: Size(4, 16, 32, 4, 2),
        4: Size(4, 16, 32, 4, 2),
        9: Size(3, 18, 36, 9, 2),
        16: Size(4, 16, 64, 16, 2),
    },
}
PROCESSES = (1, 4, 9, 16)


@dataclass(frozen=True)
class Case:
    """One group of variants, which alternate in one set of processes."""

    name: str
    processes: int
    recompute: bool

    @property
    def size(self) -> Size:
        return SIZES[self.name][self.processes]

    @property
    def side(self) -> int:
        """Return the number of rows (and columns) of the square grid of all processes."""
        return math.isqrt(self.processes)

    @property
    def key(self) -> str:
        return f"{self.name}/{self.processes}/{'recompute' if self.recompute else 'keep'}"

    def describe(self) -> str:
        """Return for instance `small, 4 processes, with recomputation`."""
        plural = "es" if self.processes > 1 else ""
        recompute = "with" if self.recompute else "no"
        return f"{self.name}, {self.processes} process{plural}, {recompute} recomputation"
