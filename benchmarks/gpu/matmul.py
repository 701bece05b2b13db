"""Measures the ceiling of a device: how fast torch.matmul is on large squares and on our shapes.

A fraction of the vendor's peak says little, since no product reaches that peak. The speed of the
fastest product on random data (zeros are faster) is what a training step can be compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.report import Report, median, seconds_of, table
from gridformer.config import ModelConfig

SQUARES = (4096, 8192, 16384)
CPU_SQUARES = (512, 1024)
QUICK_SQUARES = (64, 128)


@dataclass(frozen=True)
class Product:
    """One product [m, k] x [k, n].

    Attributes:
        transposed: Whether the second operand is stored as [n, k].
    """

    label: str
    m: int
    k: int
    n: int
    transposed: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


@dataclass(frozen=True)
class Speed:
    """TFLOP/s of a product: the median over its repeats, and the fastest."""

    product: Product
    median: float
    best: float


def squares(quick: bool, device: torch.device) -> list[Product]:
    sizes = SQUARES if device.type == "cuda" else CPU_SQUARES
    return [Product("square", n, n, n) for n in (QUICK_SQUARES if quick else sizes)]


def products_of(config: ModelConfig, tokens: int) -> list[Product]:
    """Return the forward products of a GPT-2 or Llama on that many tokens.

    The head's product is included twice: unpadded, and with the vocabulary padded to a multiple of
    128. An odd vocabulary such as 50257 gives rows that are not aligned in memory, and slower
    kernels.
    """
    h, f, v = config.hidden_size, config.ffn_size, config.vocab_size
    name, inner = config.name, config.n_heads * config.head_width
    qkv = inner + 2 * config.kv_heads * config.head_width
    padded = -(-v // 128) * 128
    return [
        Product(f"{name} qkv", tokens, h, qkv),
        Product(f"{name} attention out", tokens, inner, h),
        Product(f"{name} mlp up", tokens, h, (1 + config.gated) * f),
        Product(f"{name} mlp down", tokens, f, h),
        Product(f"{name} head", tokens, h, v, transposed=True),
        Product(f"{name} head, v padded", tokens, h, padded, transposed=True),
    ]


def measure(
    product: Product, device: torch.device, repeats: int, dtype: torch.dtype = torch.bfloat16
) -> Speed:
    """Time a product on normal random numbers, after three untimed products."""
    a = torch.randn(product.m, product.k, device=device, dtype=dtype)
    shape = (product.n, product.k) if product.transposed else (product.k, product.n)
    b = torch.randn(shape, device=device, dtype=dtype)
    b = b.t() if product.transposed else b
    out = torch.empty(product.m, product.n, device=device, dtype=dtype)
    for _ in range(3):
        torch.matmul(a, b, out=out)
    times = seconds_of(lambda: torch.matmul(a, b, out=out), device, repeats)
    return Speed(product, product.flops / median(times) / 1e12, product.flops / min(times) / 1e12)


def measure_all(
    products: list[Product],
    device: torch.device,
    repeats: int,
    report: Report,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Speed]:
    """Measure each product's speed, skipping and reporting those that do not fit into memory.

    Raises:
        ValueError: No product fits.
    """
    speeds = []
    for product in products:
        try:
            speeds.append(measure(product, device, repeats, dtype))
        except torch.OutOfMemoryError:
            report.progress(f"{product.label} {product.m}x{product.k}x{product.n}: out of memory")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not speeds:
        raise ValueError("no product fits into the device's memory; free some of it")
    return speeds


def ceiling_of(speeds: list[Speed]) -> Speed:
    """Return the product with the highest median speed."""
    return max(speeds, key=lambda speed: speed.median)


def write(speeds: list[Speed], repeats: int, report: Report) -> None:
    """Write the table and, below it, the ceiling."""
    top = ceiling_of(speeds)
    rows = [
        [
            s.product.label,
            f"{s.product.m} x {s.product.k} x {s.product.n}",
            f"{s.median:,.3g}",
            f"{s.best:,.3g}",
            f"{100 * s.median / top.median:.0f} %",
        ]
        for s in speeds
    ]
    columns = ["product", "m x k x n", "TFLOP/s, median", "fastest", "of the ceiling"]
    report.write(table(columns, rows))
    report.write(
        f"\nIn bfloat16 on random data, {repeats} timed repeats each after 3 untimed ones. "
        f"Ceiling: {top.median:,.3g} TFLOP/s ({top.product.label} of {top.product.m})."
    )
