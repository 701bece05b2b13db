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
from gridformer.train.attention import MEASURED, Shape, times_of
from gridformer.utils import rng

Tile = tuple[str, int]  # a kernel, and which of its tiles in `flash.TILES`
KERNELS = ("forward", "backward_queries", "backward_keys")
# The first ones are those that are used without measuring, and 4 is the number of all others.
TILES: tuple[Tile, ...] = tuple((name, i) for i in range(4) for name in KERNELS)
SHAPE, QUICK_SHAPE = (8, 20, 1024, 64), (1, 1, 48, 16)  # samples, heads, tokens, width: gpt2-774m
P, REPEATS = 0.1, 10
# gpt2-774m, batch 8; llama-3.2-1b, batch 4; the same on two rows that divide sequences.
BACKENDS = (
    (160, 160, 1024, 1024, 64, True), (128, 32, 2048, 2048, 64, True),
    (128, 32, 512, 2048, 64, True),
)  # fmt: skip
QUICK_BACKEND = (2, 1, 16, 16, 8, True)
# A 36th of attention in a step of gpt2-774m in docs/results/gpu.md, by the instructions for a score
# that sm_90 executes now and did then (docs/reference/kernels.md): the prediction for all tiles.
PREDICTED_MS = 8 / 36 * 23.5 / 40.3, 35 / 36 * (21.9 + 26.4) / (77.8 + 67.3)


def measure(device: torch.device, quick: bool, limit_s: float, report: Report) -> None:
    """Write milliseconds of forward and backward passes with the tiles of today and others."""
    tiles, rows = (TILES[:2] if quick else TILES), []
    with ProcessPoolExecutor(6, get_context("spawn")) as pool:
        problems = [*pool.map(_problem, tiles, [device.type] * len(tiles))]
    report.progress("compiled")
    for tile, problem in zip(tiles, problems):
        name = said_of(tile)
        if problem or report.seconds > limit_s:
            rows.append([name, problem or "no time was left", "", "", ""])
            continue
        ms = milliseconds(tile, device.type, 1 if quick else REPEATS)
        said = ["-" if quick else f"{one:.3f}" for one in PREDICTED_MS]
        rows.append([name, said[0], f"{ms[0]:.3f}", said[1], f"{ms[1]:.3f}"])
        report.keep(tiles=name, forward_ms=ms[0], backward_ms=ms[1])
    columns = [
        "kernel: queries x keys",
        "predicted, ms forward",
        "measured",
        "predicted, ms backward",
    ]
    report.write(table([*columns, "measured"], rows))
    report.write(
        f"\nCausal attention with dropout {P:g} in bfloat16, {QUICK_SHAPE if quick else SHAPE} "
        "samples, heads, tokens and elements of a head. Predicted for all tiles is what attention "
        "took in a step of gpt2-774m (docs/results/gpu.md)."
    )


def measure_backends(device: torch.device, quick: bool, report: Report) -> None:
    """Write milliseconds of PyTorch's kernels of attention, forward and backward together."""
    shapes = [Shape(1, *QUICK_BACKEND)] if quick else [Shape(1, *each) for each in BACKENDS]
    names = ("flash", "math") if quick else MEASURED
    dtype = torch.float32 if quick else torch.bfloat16
    every = [times_of(names, [shape], dtype, device) for shape in shapes]
    rows = [
        [
            str(tuple(shape)),
            *(f"{1e3 * times[name]:.3f}" if name in times else "-" for name in names),
        ]
        for shape, times in zip(shapes, every)
    ]
    report.write("\nWhat `train.attention: auto` would measure, ms:\n")
    report.write(table([", ".join(Shape._fields), *names], rows))
    report.keep(backends={str(tuple(shape)): times for shape, times in zip(shapes, every)})


def said_of(tile: Tile) -> str:
    """Return the kernel and the sizes of a tile."""
    from gridformer.models.kernels import flash

    name, index = tile
    return "{}: {}x{}, {} warps, {} stages".format(name, *flash.TILES[name][index])


def _problem(tile: Tile, device: str) -> str:
    try:
        milliseconds(tile, device, 1)
    except Exception as error:
        return phrase(error)
    return ""


def milliseconds(tile: Tile, device: str, repeats: int) -> tuple[float, float]:
    """Return the median times of both passes, if other kernels have the first of their tiles."""
    from gridformer.models.kernels import flash

    b, n, s, d = SHAPE if device == "cuda" else QUICK_SHAPE

    def random() -> Tensor:
        return torch.randn(b, s, n, d, device=device, dtype=torch.bfloat16).transpose(1, 2)

    q, k, v, grad = (random() for _ in range(4))
    counter = torch.tensor([*rng.halves(rng.key(1, 2, "tiles")), 0, 0], device=device)
    inputs, settings = (q, k, v, None, None, None, counter), (True, d**-0.5, 0, P, 0)
    every, (kernel, index) = flash.tile_sizes, tile

    def sizes(q: Tensor, name: str) -> list[dict[str, int]]:
        return [every(q, name)[index if name == kernel else 0]]

    with patch.object(flash, "tile_sizes", sizes):
        out, lse = flash.launch_attention(*inputs, *settings)

        def backward() -> object:
            return flash.launch_attention_backward(grad, *inputs, None, out, lse, *settings, False)

        backward()
        passes = (lambda: flash.launch_attention(*inputs, *settings)), backward
        times = [median(seconds_of(run, torch.device(device), repeats)) for run in passes]
    return 1e3 * times[0], 1e3 * times[1]
