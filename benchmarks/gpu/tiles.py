"""Measures attention with dropout with several sizes of its kernels' tiles.

The kernels are compiled in several other processes, and then measured in this one. On a CPU
Triton's interpreter runs them (set TRITON_INTERPRET=1), which shows only that the code works.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.report import Report, median, phrase, seconds_of, table
from gridformer.utils import rng

Tile = tuple[int, ...]  # queries, keys, warps, stages; empty for those that are used today
# The most promising ones first, because the time may not suffice for all.
TILES: tuple[Tile, ...] = (
    (), (64, 64, 4, 2), (128, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 3), (128, 64, 8, 3),
    (64, 128, 8, 2), (128, 128, 8, 2), (64, 32, 4, 3), (32, 64, 4, 2), (128, 32, 4, 3),
)  # fmt: skip
SHAPE, QUICK_SHAPE = (8, 20, 1024, 64), (1, 1, 48, 16)  # samples, heads, tokens, width: gpt2-774m
P, REPEATS = 0.1, 10
# A 36th of attention in a step of gpt2-774m in docs/results/gpu.md: the prediction for all tiles
PREDICTED_MS = 8 / 36, 35 / 36


def measure(device: torch.device, quick: bool, limit_s: float, report: Report) -> None:
    """Write milliseconds of forward and backward passes with the tiles of today and others."""
    tiles, rows = (TILES[:2] if quick else TILES), []
    with ProcessPoolExecutor(6, get_context("spawn")) as pool:
        problems = [*pool.map(_problem, tiles, [device.type] * len(tiles))]
    report.progress("compiled")
    for tile, problem in zip(tiles, problems):
        name = "{}x{}, {} warps, {} stages".format(*tile) if tile else "those of today"
        if problem or report.seconds > limit_s:
            rows.append([name, problem or "no time was left", "", "", ""])
            continue
        ms = milliseconds(tile, device.type, 1 if quick else REPEATS)
        said = ["-" if quick else f"{one:.3f}" for one in PREDICTED_MS]
        rows.append([name, said[0], f"{ms[0]:.3f}", said[1], f"{ms[1]:.3f}"])
        report.keep(tiles=name, forward_ms=ms[0], backward_ms=ms[1])
    columns = ["queries x keys", "predicted, ms forward", "measured", "predicted, ms backward"]
    report.write(table([*columns, "measured"], rows))
    report.write(
        f"\nCausal attention with dropout {P:g} in bfloat16, {QUICK_SHAPE if quick else SHAPE} "
        "samples, heads, tokens and elements of a head. Predicted for all tiles is what attention "
        "took in a step of gpt2-774m (docs/results/gpu.md)."
    )


def _problem(tile: Tile, device: str) -> str:
    try:
        milliseconds(tile, device, 1)
    except Exception as error:
        return phrase(error)
    return ""


def milliseconds(tile: Tile, device: str, repeats: int) -> tuple[float, float]:
    """Return the median times of a forward and a backward pass."""
    from gridformer.models.kernels import flash

    b, n, s, d = SHAPE if device == "cuda" else QUICK_SHAPE

    def random() -> Tensor:
        return torch.randn(b, s, n, d, device=device, dtype=torch.bfloat16).transpose(1, 2)

    q, k, v, grad = (random() for _ in range(4))
    counter = torch.tensor([*rng.halves(rng.key(1, 2, "tiles")), 0, 0], device=device)
    inputs, settings = (q, k, v, None, None, None, counter), (True, d**-0.5, 0, P, 0)
    names = dict(zip(("R", "C", "num_warps", "num_stages"), tile), D=d)
    sizes = (lambda q, forward: names) if tile else flash.tile_sizes
    with patch.object(flash, "tile_sizes", sizes):
        out, lse = flash.launch_attention(*inputs, *settings)

        def backward() -> object:
            return flash.launch_attention_backward(grad, *inputs, None, out, lse, *settings, False)

        backward()
        passes = (lambda: flash.launch_attention(*inputs, *settings)), backward
        times = [median(seconds_of(run, torch.device(device), repeats)) for run in passes]
    return 1e3 * times[0], 1e3 * times[1]
