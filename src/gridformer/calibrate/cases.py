"""The shapes and sizes that `gridformer calibrate` measures: on a GPU, on a CPU, and in tests.

The shapes are those of transformers. A linear layer of `tokens` tokens from `inner` to `outer`
features makes three products: forward, and two in its backward pass, each with operands in another
order.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

KIB, MIB = 2**10, 2**20


class LinearShape(NamedTuple):
    """A linear layer of `tokens` tokens from `inner` to `outer` features."""

    tokens: int
    inner: int
    outer: int

    @property
    def flop(self) -> float:
        """Floating-point operations of each of its three products."""
        return 2.0 * self.tokens * self.inner * self.outer


class AttentionShape(NamedTuple):
    """Fused attention with heads of `width` features."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    causal: bool

    @property
    def flop(self) -> float:
        """Floating-point operations of the whole scores, forward."""
        return 4.0 * self.batch * self.heads * self.queries * self.keys * self.width


class BatchedShape(NamedTuple):
    """A batched product [batch, m, k] x [batch, k, n]."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flop(self) -> float:
        """Floating-point operations of the whole batch."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Cases:
    """Everything that is measured on one machine.

    Attributes:
        dtypes: Data types of products and attention, the most important one first. `tf32` are
            float32 tensors multiplied as TF32.
        linears: Products of linear layers for the first data type.
        few_linears: The same for the other data types, and where many processes share the cores.
        batched: Batched products.
        attention: Fused attention.
        bytes: Bytes that memory-bound kernels read and write.
        messages: Bytes of messages.
        window_s: Seconds for which one operation is repeated.
    """

    dtypes: tuple[str, ...]
    linears: tuple[LinearShape, ...]
    few_linears: tuple[LinearShape, ...]
    batched: tuple[BatchedShape, ...]
    attention: tuple[AttentionShape, ...]
    bytes: tuple[int, ...]
    messages: tuple[int, ...]
    window_s: float


def gpu_cases() -> Cases:
    """Returns the cases of a GPU: less than a minute on an H100, by estimate."""
    widths = (768, 1024, 1280, 1920, 2304, 4096)
    layers = [
        shape
        for tokens, h in itertools.product((1024, 4096, 16384), widths)
        for shape in (LinearShape(tokens, h, h), LinearShape(tokens, h, 4 * h))
    ]
    skinny = [LinearShape(t, h, 3 * h // 8) for t in (2048, 8192) for h in (1024, 4096, 12288)]
    small = [LinearShape(t, i, o) for t in (128, 512) for i, o in ((512, 512), (1024, 4096))]
    heads = [LinearShape(t, h, 50304) for t, h in ((1024, 768), (4096, 1280), (4096, 2304))]
    odd = [
        LinearShape(4096, 768, 50257),
        LinearShape(4096, 4096, 4096),
        LinearShape(8192, 8192, 8192),
    ]
    few = [LinearShape(t, h, o) for t in (1024, 4096) for h, o in ((1024, 1024), (2048, 8192))]
    attention = [
        AttentionShape(b, n, s, s, d, causal)
        for b, n, s, d in (
            (8, 12, 1024, 64),
            (8, 20, 1024, 64),
            (4, 16, 1024, 96),
            (4, 16, 1024, 128),
            (2, 16, 2048, 128),
            (1, 16, 4096, 128),
            (1, 8, 8192, 128),
            (2, 12, 1024, 64),
            (1, 4, 512, 64),
        )
        for causal in (True, False)
    ] + [AttentionShape(b, n, 512, 512, 64, False) for b, n in ((8, 16), (32, 16), (64, 12))]
    return Cases(
        dtypes=("bfloat16", "float16", "tf32", "float32"),
        linears=tuple(dict.fromkeys([*layers, *skinny, *small, *heads, *odd])),
        few_linears=tuple(few),
        batched=(
            BatchedShape(96, 1024, 1024, 64),
            BatchedShape(96, 1024, 64, 1024),
            BatchedShape(128, 512, 512, 64),
            BatchedShape(128, 512, 64, 512),
        ),
        attention=tuple(attention),
        bytes=(64 * KIB, MIB, 8 * MIB, 64 * MIB, 512 * MIB, 2048 * MIB),
        messages=(4, 4 * KIB, 64 * KIB, MIB, 8 * MIB, 64 * MIB, 256 * MIB),
        window_s=0.03,
    )


def cpu_cases() -> Cases:
    """Returns the cases of a CPU that several processes share."""
    linears = [
        LinearShape(tokens, inner, outer)
        for tokens, (inner, outer) in itertools.product(
            (64, 256, 1024),
            ((64, 64), (128, 512), (512, 128), (512, 512), (512, 2048), (2048, 512)),
        )
    ]
    large = [LinearShape(2048, 1024, 1024), LinearShape(1024, 1024, 4096)]
    few = [
        LinearShape(tokens, inner, outer)
        for tokens, inner, outer in (
            (64, 64, 64),
            (256, 128, 512),
            (256, 512, 128),
            (256, 512, 512),
            (1024, 512, 128),
            (1024, 128, 512),
            (1024, 512, 512),
        )
    ]
    return Cases(
        dtypes=("float32",),
        linears=(*linears, *large),
        few_linears=tuple(few),
        batched=(BatchedShape(16, 128, 128, 64), BatchedShape(16, 128, 64, 128)),
        attention=(
            AttentionShape(2, 2, 128, 128, 64, True),
            AttentionShape(8, 2, 128, 128, 64, True),
            AttentionShape(8, 8, 128, 128, 64, True),
            AttentionShape(4, 4, 512, 512, 64, True),
            AttentionShape(4, 4, 128, 128, 64, False),
        ),
        bytes=(16 * KIB, 256 * KIB, 2 * MIB, 16 * MIB),
        messages=(64, 16 * KIB, 256 * KIB, 2 * MIB, 8 * MIB),
        window_s=0.06,
    )


def quick_cases(cases: Cases) -> Cases:
    """Returns a few tiny cases, with which tests try the code."""
    return replace(
        cases,
        dtypes=cases.dtypes[:1],
        linears=(LinearShape(32, 16, 64), LinearShape(64, 32, 32)),
        few_linears=(LinearShape(32, 16, 64),),
        batched=(BatchedShape(2, 16, 16, 8),),
        attention=(AttentionShape(2, 2, 16, 16, 8, True),),
        bytes=(4 * KIB, 64 * KIB),
        messages=(64, 4 * KIB),
        window_s=0.002,
    )
