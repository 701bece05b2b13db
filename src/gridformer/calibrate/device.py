"""Measures the operations of one device, and what the host adds to them."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gridformer import comm
from gridformer.calibrate.operations import Cases, Operation, Run, operations
from gridformer.cluster.tables import Tables
from gridformer.config import LayoutConfig, ModelConfig, TrainConfig
from gridformer.mesh import Axes
from gridformer.mesh.axes import Axis
from gridformer.parallel import build_parallel
from gridformer.record.kernels import launched_work
from gridformer.train.numerics import set_numerics
from gridformer.train.step import Stepper
from gridformer.utils.batch import next_words
from gridformer.utils.placeholder_module import without_dynamo
from gridformer.utils.torch_private import DispatchMode, keep_gpu_busy
from gridformer.utils.units import GIB

Tell = Callable[[str], None]
Meet = Callable[[], None]  # returns when all processes have called it

_HEAT = 4096  # the size of the products that bring a GPU to the clock and power of training
_HEAT_CALLS = 40
_HEAT_S = 1.5
_GROUPS = 5  # timed groups of calls on a GPU, of which the median counts
_MOST_CALLS = 40  # calls in a group: the driver queues about 1,000 kernels
_HOST_S = 60e-6  # more than the host needs to launch one call, autograd included
_CYCLES_PER_S = 1.9e9  # of a GPU's clock; only the order of magnitude matters
_PARTS = 3  # of a window on a CPU, of which the median counts
_BEYOND_CACHES = 128 * 2**20  # bytes
_MOST_COPIES = 64  # of the tensors of one operation in a process
_LAYERS = (2, 8)  # of two tiny models, whose difference gives the host's time for an operator
_TOKENS = 16
_ROUNDS = 5  # in which the two models take turns


@dataclass
class Measurements:
    """Measurements of one machine before they become a cluster file; processes exchange them.

    Attributes:
        rows: Rows of `cluster.tables`, by table.
        failures: Sentences on what could not be measured.
        backend: The backend of messages; empty if none were sent.
        host: Seconds per operator and per step; empty if not measured.
    """

    rows: dict[str, list[list[Any]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    backend: str = ""
    host: list[float] = field(default_factory=list)

    def add(self, operation: Operation, processes: int, seconds: float) -> None:
        """Adds the row of an operation, which so many processes ran at the same time."""
        row = operation.row._replace(processes=processes, us=round(1e6 * seconds, 3))
        self.rows.setdefault(operation.table, []).append([*row])

    def add_host(self, processes: int) -> None:
        """Adds `host` as a row."""
        if self.host:
            launch_us, step_us = (1e6 * seconds for seconds in self.host)
            row = [processes, round(launch_us, 3), round(step_us, 1)]
            self.rows.setdefault("host", []).append(row)

    def average(self, everyone: Axis) -> None:
        """Replaces times by their means over all processes, which call this together."""
        rows = [row for table in self.rows.values() for row in table]
        own = torch.tensor([*(row[-1] for row in rows), *self.host], dtype=torch.float64)
        mean = (comm.all_reduce(own, everyone) / everyone.size).tolist()
        for row, us in zip(rows, mean):
            row[-1] = round(us, 3)
        self.host = mean[len(rows) :]

    def extend(self, other: Measurements) -> None:
        """Adds what another process has found."""
        for table, rows in other.rows.items():
            self.rows.setdefault(table, []).extend(rows)
        self.failures += [f for f in other.failures if f not in self.failures]
        self.backend = self.backend or other.backend

    def tables(self, source: str) -> Tables:
        """Returns the tables of a cluster file."""
        return Tables.model_validate({"source": source, **self.rows})

    def write(self, path: Path) -> None:
        """Writes the measurements as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Measurements:
        """Returns the measurements that `write` has written."""
        return Measurements(**json.loads(path.read_text(encoding="utf-8")))


def measure_gpu(cases: Cases, limit_s: float, tell: Tell) -> Measurements:
    """Measures the current GPU. A measurement that fails is reported, and the others go on.

    Args:
        cases: What to measure.
        limit_s: After this number of seconds the remaining measurements are left out.
        tell: Receives progress messages.
    """
    began, result = time.monotonic(), Measurements()
    device = torch.device("cuda", torch.cuda.current_device())
    set_numerics(TrainConfig())
    x = torch.randn(_HEAT, _HEAT, device=device, dtype=torch.bfloat16)

    def heat() -> None:  # about 10 ms on an H100
        for _ in range(_HEAT_CALLS):
            x @ x

    def timed(new: Callable[[], Run]) -> float:
        run = new()
        heat()  # a GPU has just computed products, as in training
        return gpu_seconds(run, cases.window_s)

    while time.monotonic() - began < _HEAT_S:
        heat()
        torch.cuda.synchronize()
    tell("what the host adds to a kernel")
    host = partial(_host_seconds, result, device, cases.dtypes[0], 10, lambda: None)
    hosts = [host()]
    last, all_of_them = "", [*operations(cases, few=False, gpu=True)]
    for number, operation in enumerate(all_of_them):
        if number == len(all_of_them) // 2:
            hosts.append(host())  # its speed varies from one second to the next if others use it
        if time.monotonic() - began > limit_s:
            result.failures.append(f"left out after {limit_s:.0f} s: from {operation} on")
            break
        kind = operation.table
        if kind == "products":
            kind += f" in {operation.row.dtype}"
        if kind != last:
            last = kind
            tell(f"{kind} ({time.monotonic() - began:.0f} s so far)")
        seconds = _guarded(operation, result, device, timed)
        if seconds is not None:
            result.add(operation, 1, seconds)
    torch.cuda.empty_cache()
    hosts.append(host())
    result.host = typical_host(hosts)
    return result


def typical_host(hosts: Sequence[Sequence[float]]) -> list[float]:
    """Returns the seconds per kernel and per step of which the former are the median.

    They were measured at several moments, and are empty where a measurement failed.
    """
    measured = sorted([*host] for host in hosts if host)
    return measured[len(measured) // 2] if measured else []


def measure_cpu(
    cases: Cases, n_processes: int, few: bool, n_cores: int, meet: Meet, tell: Tell
) -> Measurements:
    """Measures a CPU from one of n processes that share its cores, which `meet` is a barrier of.

    With `few` most operations are left out.
    """
    result, device = Measurements(), torch.device("cpu")
    waits = max(1.0, n_processes / n_cores)  # how much longer a call takes
    window_s = cases.window_s * min(3.0, waits)
    for operation in operations(cases, few, gpu=False):
        if few and operation.flop * waits > 4e9:
            continue
        copies = n_copies(operation.n_bytes, n_processes)

        def timed(new: Callable[[], Run], copies: int = copies) -> float:
            return cpu_seconds([new() for _ in range(copies)], window_s, meet)

        seconds = _guarded(operation, result, device, timed)
        if seconds is not None:
            result.add(operation, n_processes, seconds)
    tell("what Python adds to an operator")
    steps = 3 if cases.window_s > 0.01 else 1
    result.host = _host_seconds(result, device, cases.dtypes[0], steps, meet)
    return result


def n_copies(n_bytes: float, n_processes: int) -> int:
    """Returns how many copies of its tensors an operation uses in turn.

    A training step comes back to a weight after all others, and to an activation in its backward
    pass. So the tensors of all processes together, n_bytes a copy, are made larger than caches.
    """
    return max(1, min(_MOST_COPIES, math.ceil(_BEYOND_CACHES / n_processes / max(n_bytes, 1))))


def _guarded(
    operation: Operation,
    result: Measurements,
    device: torch.device,
    timed: Callable[[Callable[[], Run]], float],
) -> float | None:
    """Returns the seconds of an operation, or None after noting why it could not be measured."""
    try:
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            if operation.n_bytes > 0.9 * free:
                raise MemoryError(f"needs {operation.n_bytes / GIB:.1f} GiB")
        with operation.within(device):
            return timed(lambda: operation.build(device))
    except Exception as error:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        first = (str(error).splitlines() or [""])[0][:160]
        result.failures.append(f"{operation}: {type(error).__name__}: {first}")
        return None


# --------------------------------------------------------------------------- clocks


def gpu_seconds(run: Run, window_s: float) -> float:
    """Returns the seconds that a GPU needs for one call, without the time to launch it.

    Before each group of calls the GPU is made to wait until the host has launched them all, so that
    they follow each other on the GPU without gaps.

    Args:
        run: Launches the operation.
        window_s: For about this number of seconds it is repeated.
    """

    def group(calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        keep_gpu_busy(int(calls * _HOST_S * _CYCLES_PER_S))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / calls

    for _ in range(2):
        run()
    torch.cuda.synchronize()
    calls = int(min(_MOST_CALLS, max(1, window_s / _GROUPS / max(group(2), 1e-7))))
    return statistics.median(group(calls) for _ in range(_GROUPS))


def cpu_seconds(runs: Sequence[Run], window_s: float, meet: Meet) -> float:
    """Returns the seconds of one call while all processes make such calls at the same time.

    If more processes than cores compute, the operating system lets them take turns, which makes
    some calls much longer than others: what counts is how many calls end in a window of time.

    Args:
        runs: The operation, on tensors of its own in each of them. They take turns, and their
            results are kept until their next turn, so that caches hold none of them if they are
            many.
        window_s: For this number of seconds it is repeated.
        meet: A barrier of all processes.
    """
    kept: deque[object] = deque(maxlen=len(runs))
    turns = itertools.cycle(runs)
    for _ in range(1 + len(runs)):
        kept.append(next(turns)())
    meet()
    clock, seconds = time.perf_counter, []
    for _ in range(_PARTS):
        calls, start = 0, clock()
        until = start + window_s / _PARTS
        while True:
            kept.append(next(turns)())
            calls += 1
            now = clock()
            if now >= until:
                break
        seconds.append((now - start) / calls)
    return statistics.median(seconds)


# --------------------------------------------------------------------------- the host


@without_dynamo()
def measure_host(device: torch.device, dtype: str, steps: int, meet: Meet) -> list[float]:
    """Returns seconds per operator that computes something, its Python included, and per step.

    They are measured on training steps of two tiny GPT-2 that differ in their number of layers. The
    difference gives the time per operator; the rest is the time of a step that depends on no layer.
    On a CPU, where the host itself computes, the time of the computation is left out.
    """
    steppers = [_stepper(n_layers, device, dtype) for n_layers in _LAYERS]
    launches = []
    for step in steppers:
        for _ in range(2):
            step()
        with _Count(device) as count:
            step()
        launches.append(count.launches)

    def seconds_of(step: Callable[[], object]) -> float:
        meet()
        start = time.perf_counter()
        for _ in range(steps):
            step()  # it waits for the step before
        return (time.perf_counter() - start) / steps

    rounds = [[seconds_of(step) for step in steppers] for _ in range(_ROUNDS)]
    few = statistics.median(small for small, _ in rounds)
    many = statistics.median(large - small for small, large in rounds)
    launch_s = many / (launches[1] - launches[0])
    step_s = few - launches[0] * launch_s
    if device.type == "cpu":
        x = torch.ones(64)
        launch_s -= cpu_seconds([lambda: x + x], 0.03, meet)
    return [max(launch_s, 1e-7), max(step_s, 1e-6)]


def _host_seconds(
    result: Measurements, device: torch.device, dtype: str, steps: int, meet: Meet
) -> list[float]:
    """Returns seconds per kernel and per step, or nothing after noting why."""
    try:
        return measure_host(device, dtype, steps, meet)
    except Exception as error:
        result.failures.append(f"time of the host: {type(error).__name__}: {error}")
        return []


def _stepper(n_layers: int, device: torch.device, dtype: str) -> Run:
    config = ModelConfig(
        name="tiny", n_layers=n_layers, hidden_size=64, n_heads=4, vocab_size=128, max_seq_len=16
    )
    train = TrainConfig.model_validate({"global_batch": 1, "dtype": dtype, "steps": 100_000})
    model = build_parallel(config, LayoutConfig(), Axes(), 0, device, train.dtype)
    run_step = Stepper(model, train, Axes()).start_ahead
    tokens = torch.randint(0, 128, (1, _TOKENS + 1), device=device)
    number = itertools.count()
    return lambda: run_step(next(number), lambda rows: next_words(tokens[rows]))


class _Count(DispatchMode):
    """Counts the operators that launch something, as a trace does."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.launches, self.device = 0, device.type

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.launches += launched_work(func, args, kwargs, out, self.device) is not None
        return out
