"""The work of one process on a case of benchmarks.subgraph: build, compare, count, weigh and time.

A step is what training does with a stack of blocks: forward, backward with the sums of gradients
that overlap it, and AdamW. Variants alternate, in an order that is shuffled in every round; a step
takes as long as on its slowest process.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common.live_memory import LiveMemory, n_bytes
from benchmarks.subgraph.cases import Case, Variant, variants
from gridformer import comm
from gridformer.mesh import Axes
from gridformer.mesh.process_group import close_process_groups, init_process_groups
from gridformer.parallel import build_parallel
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data.gradients import GradientSums, owned, reduce_gradients

CPU = torch.device("cpu")
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Plan:
    case: Case
    rounds: int
    warmups: int
    timeout_s: float
    out: Path
    machine: dict[str, str]


@dataclass
class Row:
    """One variant. Counts and bytes are those of the fullest process.

    Attributes:
        seconds: The slowest process's time in every round.
        states: Bytes of parameters, gradients and AdamW's moments.
        peak: The most bytes alive at once in a step.
    """

    name: str
    title: str
    seconds: list[float]
    collectives: dict[str, int]
    messages: int
    moved: float
    moved_gradients: float
    parameters: int
    states: int
    peak: int


class Stack(nn.Module):
    """The blocks of a model, without embedding and head."""

    def __init__(self, blocks: nn.ModuleDict) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


class Built:
    """A variant on this process: its samples, its stack and its optimizer."""

    def __init__(self, variant: Variant, case: Case, axes: Axes, x: Tensor, g: Tensor) -> None:
        model = build_parallel(case.model(), variant.layout, axes, 1, CPU)
        self.variant, self.axes = variant, axes
        layers = model.get_submodule("layers")
        assert isinstance(layers, nn.ModuleDict)
        self.stack = Stack(layers)
        self.sums = GradientSums.of(self.stack, axes)
        parameters = [p for _, p in owned(self.stack)]
        self.optimizer = torch.optim.AdamW(parameters or [{"params": []}], lr=1e-3, fused=True)
        n = len(x) // (axes.dp.size * axes.batch.size)
        part = axes.dp.index * axes.batch.size + axes.batch.index
        here = axes.same_batch.index == 0  # otherwise the common layers are on another sub-grid
        self.x, self.g = (t[part * n : (part + 1) * n].to(CPU if here else "meta") for t in (x, g))

    def step(self) -> Tensor:
        """Run a step, and return this process's share of the loss, sum(y g)."""
        self.stack.zero_grad(set_to_none=True)
        x = self.x.detach().requires_grad_()
        y: Tensor = self.stack(x)
        loss = (y * self.g).sum()
        with self.sums.backward():
            loss.backward()
        reduce_gradients(self.stack.parameters(), self.axes, self.sums)
        self.optimizer.step()
        return loss.detach()


def measure(plan: Plan) -> None:
    """Run a case; the entrypoint of every process. Rank 0 appends the results to `plan.out`."""
    gc.freeze()
    case = plan.case
    world = init_process_groups("cpu", case.processes, plan.timeout_s)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)
    shape = (case.samples, case.model().max_seq_len, case.hidden)
    x, g = (torch.randn(shape, generator=generator) for _ in range(2))
    built = [
        Built(variant, case, build_axes(variant.layout, "cpu"), x, g)
        for variant in variants(case.processes)
    ]
    rows = []
    want = 0.0
    for each in built:
        first, second = (_total(each.step()) for _ in range(2))
        want = want or second
        if not abs(second / want - 1) < TOLERANCE:
            raise SystemExit(f"{each.variant.title}: loss {second} after a step, not {want}")
        del first
        rows.append(_examine(each))
    _time(built, rows, plan)
    if world.rank == 0:
        line = {
            "case": asdict(case),
            "rounds": plan.rounds,
            "rows": [asdict(row) for row in rows],
            "machine": plan.machine,
        }
        plan.out.parent.mkdir(parents=True, exist_ok=True)
        with plan.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    dist.barrier()
    close_process_groups()


def _examine(built: Built) -> Row:
    """Count the messages and bytes of one step."""
    with comm.record_messages() as record:
        built.step()
    n_messages = sum(len(one.targets) for one in record.records)  # as Jain et al. 2021 count them
    parameters = [*built.stack.parameters()]
    moments = [m for s in built.optimizer.state.values() for m in s.values()]
    with LiveMemory([*parameters, *moments, built.x, built.g]) as memory:
        built.step()
    held = n_bytes(parameters)
    numbers = torch.tensor(
        [
            n_messages,
            record.moved(),
            record.moved("gradients"),
            held,
            2 * held + n_bytes(moments),
            memory.peak,
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    messages, moved, gradients, held, states, peak = numbers.tolist()
    return Row(
        name=built.variant.name,
        title=built.variant.title,
        seconds=[],
        collectives=dict(Counter(record.count())),
        messages=int(messages),
        moved=moved,
        moved_gradients=gradients,
        parameters=int(held),
        states=int(states),
        peak=int(peak),
    )


def _time(built: list[Built], rows: list[Row], plan: Plan) -> None:
    order = list(range(len(built)))
    for number in range(plan.warmups + plan.rounds):
        random.Random(number).shuffle(order)
        for i in order:
            seconds = _slowest(built[i].step)
            if number >= plan.warmups:
                rows[i].seconds.append(seconds)
    if dist.get_rank() == 0:
        print(f"  {plan.rounds} rounds done", file=sys.stderr, flush=True)


def _slowest(step: Callable[[], Tensor]) -> float:
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    step()
    took = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _total(loss: Tensor) -> float:
    mine = torch.zeros((), dtype=torch.float64)
    if not loss.is_meta:
        mine += loss
    dist.all_reduce(mine)
    return float(mine)
