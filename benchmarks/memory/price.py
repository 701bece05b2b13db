"""What each memory-saving method costs: the time of a step, and its arithmetic.

The models of all methods are on the same processes and take turns, in an order that is shuffled in
every round; a step takes as long as on its slowest process.
"""

from __future__ import annotations

import gc
import json
import random
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.memory.cases import METHODS, PRICE_BATCH, PRICE_LAYOUTS, PRICE_MODEL
from benchmarks.memory.measure import DEVICE
from gridformer import comm
from gridformer.config import DataConfig, RunConfig, TrainConfig
from gridformer.data.samples.order import Rows
from gridformer.mesh import Axes
from gridformer.mesh.process_group import close_process_groups, init_process_groups
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.axes import build_axes
from gridformer.train.step import Stepper


@dataclass(frozen=True)
class Price:
    """Seconds of each round, and floating-point operations of rank 0's products, for one method."""

    layout: str
    method: str
    seconds: list[float]
    flops: float


class Flops(TorchDispatchMode):
    """Counts floating-point operations of products and of attention.

    torch's FlopCounterMode also watches modules, with hooks that do not allow a backward pass
    within a forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def price_run(layout: str, method: str) -> RunConfig:
    return RunConfig(
        model=PRICE_MODEL,
        data=DataConfig(path=Path("none")),
        layout=PRICE_LAYOUTS[layout],
        train=TrainConfig(**{"global_batch": PRICE_BATCH, "device": "cpu", **METHODS[method]}),
    )


def measure(layout: str, rounds: int, warmups: int, out: Path) -> None:
    """Time all methods; the entrypoint of every process. Rank 0 writes a line for each method."""
    gc.freeze()
    first = price_run(layout, next(iter(METHODS)))
    world = init_process_groups("cpu", first.layout.n_processes, 600.0)
    torch.set_num_threads(max(1, 2 // world.size))
    axes = build_axes(first.layout, "cpu", decide_run(first).block)
    steppers = {method: _stepper(price_run(layout, method), axes) for method in METHODS}
    generator = torch.Generator().manual_seed(1)
    shape = (PRICE_BATCH, PRICE_MODEL.max_seq_len + 1)
    text = torch.randint(0, PRICE_MODEL.vocab_size, shape, generator=generator)
    flops = {}
    for method, stepper in steppers.items():
        with Flops() as counter:
            stepper(0, partial(_rows, text))
        flops[method] = counter.total
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    order = random.Random(2)
    for number in range(warmups + rounds):
        for method in order.sample([*METHODS], len(METHODS)):
            comm.barrier((axes.world,))
            began = time.perf_counter()
            steppers[method](number + 1, partial(_rows, text))
            took = torch.tensor(time.perf_counter() - began)
            if number >= warmups:
                slowest = comm.all_reduce(took, axes.world, "max")
                seconds[method].append(float(slowest))
    if world.rank == 0:
        lines = [
            json.dumps(asdict(Price(layout, method, seconds[method], flops[method])))
            for method in METHODS
        ]
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    close_process_groups()


def _stepper(run: RunConfig, axes: Axes) -> Stepper:
    choices = decide_run(run).choices
    model = build_parallel(run.model, run.layout, axes, 1, DEVICE, run.train.dtype, choices)
    return Stepper(model, run.train, axes, run.layout)


def _rows(text: Tensor, rows: Rows) -> dict[str, Tensor]:
    return {"tokens": text[rows, :-1], "targets": text[rows, 1:]}
