"""The work of one process in one group: build, check, count, weigh and time the variants.

The timed loop visits the variants in turn, so that a slow minute of the machine affects all of them
alike, in an order that is shuffled in every round. All processes meet at a barrier before each
phase, and a phase takes as long as on its slowest rank. Variants of one process run on rank 0 while
the others sleep in the barrier (gloo's barrier waits without spinning).
"""

from __future__ import annotations

import gc
import math
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.schemes import results
from benchmarks.schemes.cases import Case
from benchmarks.schemes.live import Live, measure_live
from benchmarks.schemes.torch_variants import torch_variants
from benchmarks.schemes.traffic import Traffic
from benchmarks.schemes.variants import (
    Built,
    Problem,
    Variant,
    Whole,
    gridformer_variants,
    make_problem,
)
from gridformer.mesh.process_group import close_process_groups, init_process_groups
from gridformer.utils.process import n_cores

TOLERANCE = 1e-4  # relative to the largest element; float32


@dataclass(frozen=True)
class Plan:
    """What the command line asks of a group.

    Attributes:
        variants: Names of the variants, including the reference.
    """

    case: Case
    variants: tuple[str, ...]
    rounds: int
    warmups: int
    timeout_s: float
    out: Path
    machine: dict[str, str]


def all_variants(processes: int) -> list[Variant]:
    """Return every variant for this number of processes; the first is the reference."""
    return gridformer_variants(processes) + torch_variants(processes)


class VariantDiffers(Exception):  # noqa: N818 - reads as a sentence
    """A variant does not compute what one process computes, so its time means nothing."""


@dataclass
class _Entry:
    """A variant in this process; `built` is None if it runs only on another rank."""

    variant: Variant
    threads: int
    built: Built | None
    row: results.Row | None = None


def measure(plan: Plan) -> None:
    """Run a group; the entrypoint of every process. Rank 0 appends the results to `plan.out`."""
    case = plan.case
    gc.freeze()  # imported objects stay alive, so later collections can skip them
    world = init_process_groups("cpu", case.processes, plan.timeout_s)
    wanted = [v for v in all_variants(case.processes) if v.name in plan.variants]
    able = [v for v in wanted if not v.obstacles(case.size)]
    problem = make_problem(case.size)
    reference = _reference(able[0], case, problem)
    entries = []
    for variant in able:
        threads = variant.threads(case.processes, n_cores())
        _use_threads(threads)
        alone_elsewhere = variant.alone and world.rank != 0
        entry = _Entry(variant, threads, None if alone_elsewhere else variant.build(case, problem))
        entry.row = _examine(entry, case, reference)
        entries.append(entry)
        _say(f"  {variant.title}: checked")
    del reference, problem  # these are whole tensors on every rank
    rows = _time(entries, plan)
    if world.rank == 0:
        unable = [
            results.Row(v.name, v.title, obstacles)
            for v in wanted
            if (obstacles := v.obstacles(case.size))
        ]
        group = results.Group(
            key=case.key,
            title=case.describe(),
            name=case.name,
            processes=case.processes,
            recompute=case.recompute,
            size=asdict(case.size),
            rounds=plan.rounds,
            rows=rows + unable,
            machine=plan.machine,
        )
        results.append(plan.out, group)
    meet()
    close_process_groups()


def meet() -> None:
    """Return once every process has called this."""
    if dist.is_initialized():
        dist.barrier()


def _say(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def _use_threads(threads: int) -> None:
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


# --------------------------------------------------------------------------- exactness


@dataclass(frozen=True)
class Outcome:
    """Results of a stack in full: y and dx [b, s, h], and the gradients of all weights by name."""

    y: Tensor
    dx: Tensor
    grads: Whole


def _reference(variant: Variant, case: Case, problem: Problem) -> Outcome:
    """Compute one process's outcome on rank 0 and broadcast it to all."""
    assert variant.alone, "the reference runs on one process"
    grads = {name: torch.empty_like(weight) for name, weight in problem.weights.items()}
    outcome = Outcome(torch.empty_like(problem.x), torch.empty_like(problem.x), grads)
    if not dist.is_initialized() or dist.get_rank() == 0:
        built = variant.build(case, problem)
        y = built.forward()
        built.backward(y)
        outcome.y.copy_(y.detach())
        outcome.dx.copy_(_grad(built.x))
        for name, mine, _ in built.compared(grads):
            grads[name].copy_(mine)
    if dist.is_initialized():
        for tensor in (outcome.y, outcome.dx, *grads.values()):
            dist.broadcast(tensor, 0)
    return outcome


def differences(built: Built, y: Tensor, reference: Outcome) -> dict[str, float]:
    """Return this rank's largest differences, relative to the largest element of the whole tensor.

    Call it after a backward. `elements` counts the gradient elements that were compared.
    """
    worst = {
        "y": _relative(y.detach(), built.cut(reference.y), reference.y),
        "dx": _relative(_grad(built.x), built.cut(reference.dx), reference.dx),
        "gradients": 0.0,
        "elements": 0.0,
    }
    for name, mine, want in built.compared(reference.grads):
        distance = _relative(mine, want, reference.grads[name])
        worst["gradients"] = max(worst["gradients"], distance)
        worst["elements"] += mine.numel()
    return worst


def refuse_differing(title: str, worst: dict[str, float]) -> None:
    """Raise VariantDiffers if a difference exceeds TOLERANCE or is NaN."""
    wrong = {name: value for name, value in worst.items() if not value <= TOLERANCE}
    if wrong:
        found = ", ".join(f"{name} by {value:.1e}" for name, value in wrong.items())
        raise VariantDiffers(f"{title} differs from one process: {found}; {TOLERANCE} is allowed")


def _relative(mine: Tensor, want: Tensor, whole: Tensor) -> float:
    """Return the largest difference, or infinity if it is NaN, which `max` could overlook."""
    assert mine.shape == want.shape, f"{tuple(mine.shape)} is not {tuple(want.shape)}"
    if not mine.numel():
        return 0.0
    distance = float((mine - want).abs().max() / whole.abs().max())
    return math.inf if math.isnan(distance) else distance


def _grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


# --------------------------------------------------------------------------- one variant


def _examine(entry: _Entry, case: Case, reference: Outcome) -> results.Row:
    """Check a variant, count its messages and measure its memory, in four untimed passes."""
    variant, built = entry.variant, entry.built
    numbers = {"y": 0.0, "dx": 0.0, "gradients": 0.0}
    elements, live = 0.0, Live()
    forward, backward = Traffic(), Traffic()
    if built is not None:
        built.backward(built.forward())  # torch's variants finish their setup in the first pass
        built.clear()
        with built.count() as forward:
            y = built.forward()
        with built.count() as backward:
            built.backward(y)
        numbers = differences(built, y, reference)
        elements = numbers.pop("elements")
        del y
        live = measure_live(built)
    worst = dict(zip(numbers, _over_ranks(numbers.values(), "max")))
    refuse_differing(variant.title, worst)
    # At least one rank has compared each element of a gradient.
    n_parameters = sum(g.numel() for g in reference.grads.values())
    assert _over_ranks([elements], "sum")[0] >= n_parameters, f"{variant.title}: gradients missing"
    volume = variant.volume(case.size, case.recompute)
    weights = asdict(live)
    return results.Row(
        name=variant.name,
        title=variant.title,
        obstacles=[],
        threads=entry.threads,
        count=[dict(forward.count), dict(backward.count)],
        moved=_over_ranks([forward.elements, backward.elements], "max"),
        formula=[volume.forward, volume.backward],
        live={k: int(v) for k, v in zip(weights, _over_ranks(weights.values(), "max"))},
        worst=worst,
    )


def _over_ranks(values: Iterable[float], op: str) -> list[float]:
    """Combine numbers over all processes; `op` is "max" or "sum"."""
    tensor = torch.tensor(list(values), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
    result: list[float] = tensor.tolist()
    return result


# --------------------------------------------------------------------------- the timed loop


def _time(entries: list[_Entry], plan: Plan) -> list[results.Row]:
    seconds: dict[str, list[list[float]]] = {entry.variant.name: [] for entry in entries}
    order = random.Random(0)  # the same order on every rank
    gc.collect()
    gc.freeze()  # makes the collections between visits cheap
    gc.disable()
    for round_ in range(-plan.warmups, plan.rounds):
        for entry in order.sample(entries, len(entries)):
            phases = _visit(entry)
            if round_ >= 0:
                seconds[entry.variant.name].append(phases)
        if round_ in (0, plan.rounds - 1):
            _say(f"  round {round_ + 1} of {plan.rounds}")
    gc.enable()
    rows = []
    for entry in entries:
        assert entry.row is not None
        flat = [value for phases in seconds[entry.variant.name] for value in phases]
        slowest = _over_ranks(flat, "max")
        pairs = [list(pair) for pair in zip(slowest[::2], slowest[1::2])]
        rows.append(results.Row(**{**asdict(entry.row), "seconds": pairs}))
    return rows


def _visit(entry: _Entry) -> list[float]:
    """Return the seconds of one forward and one backward on this rank; zeros if it only waits."""
    built = entry.built
    if built is None:
        for _ in range(3):
            meet()
        return [0.0, 0.0]
    _use_threads(entry.threads)
    built.clear()
    gc.collect()
    meet()
    start = time.perf_counter()
    y = built.forward()
    forward = time.perf_counter() - start
    meet()
    start = time.perf_counter()
    built.backward(y)
    backward = time.perf_counter() - start
    meet()
    built.clear()
    return [forward, backward]
