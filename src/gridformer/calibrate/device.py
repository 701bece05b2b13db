"""Measures the operations of one device, and what the host adds to them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from gridformer import comm
from gridformer.calibrate.cases import Cases
from gridformer.calibrate.clock import Meet, cpu_seconds, gpu_seconds
from gridformer.calibrate.found import Measurements
from gridformer.calibrate.host import measure_host
from gridformer.calibrate.operations import Operation, Run, operations
from gridformer.config import TrainConfig
from gridformer.mesh.axes import Axis
from gridformer.train.numerics import set_numerics

Tell = Callable[[str], None]
_HEAT = 4096  # the size of the products that bring a GPU to the clock and power of training
_HEAT_CALLS = 40
_HEAT_S = 1.5
_BEYOND_CACHES = 128 * 2**20  # bytes
_MOST_COPIES = 64  # of the tensors of one operation in a process


def measure_gpu(cases: Cases, limit_s: float, tell: Tell) -> Measurements:
    """Measures the current GPU. A measurement that fails is reported, and the others go on.

    Args:
        cases: What to measure.
        limit_s: After this number of seconds the remaining measurements are left out.
        tell: Receives progress messages.
    """
    began, found = time.monotonic(), Measurements()
    device = torch.device("cuda", torch.cuda.current_device())
    set_numerics(TrainConfig())
    heat = _heater(device)
    while time.monotonic() - began < _HEAT_S:
        heat()
        torch.cuda.synchronize()
    tell("what the host adds to a kernel")
    hosts: list[list[float]] = []

    def host() -> None:
        hosts.append(_host_seconds(found, device, cases.dtypes[0], 10, lambda: None))

    host()
    last, all_of_them = "", [*operations(cases, few=False, gpu=True)]
    for number, operation in enumerate(all_of_them):
        if number == len(all_of_them) // 2:
            host()  # its speed varies from one second to the next where others use it, too
        if time.monotonic() - began > limit_s:
            found.failures.append(f"left out after {limit_s:.0f} s: from {operation} on")
            break
        kind = str(operation.table)
        if kind == "products":
            kind += f" in {operation.key['dtype']}"
        if kind != last:
            last = kind
            tell(f"{kind} ({time.monotonic() - began:.0f} s so far)")
        seconds = _guarded(operation, found, device, lambda new: _hot(new(), heat, cases.window_s))
        if seconds is not None:
            found.add(operation.table, operation.key, 1, seconds)
    torch.cuda.empty_cache()
    host()
    found.host = typical_host(hosts)
    return found


def typical_host(hosts: Sequence[Sequence[float]]) -> list[float]:
    """Returns the measurement whose time per kernel is the median; none if there are none.

    Args:
        hosts: Seconds per kernel and seconds per step, measured at several moments; empty where a
            measurement failed.
    """
    measured = sorted([*host] for host in hosts if host)
    return measured[len(measured) // 2] if measured else []


def measure_cpu(
    cases: Cases, n_processes: int, few: bool, n_cores: int, meet: Meet, tell: Tell
) -> Measurements:
    """Measures a CPU from one of the processes that share it.

    Args:
        cases: What to measure.
        n_processes: How many processes measure at the same time.
        few: Whether to leave out most operations.
        n_cores: Cores of the machine.
        meet: A barrier of all processes.
        tell: Receives progress messages.
    """
    found, device = Measurements(), torch.device("cpu")
    waits = max(1.0, n_processes / n_cores)  # how much longer a call takes
    window_s = cases.window_s * min(3.0, waits)
    for operation in operations(cases, few, gpu=False):
        if few and operation.flop * waits > 4e9:
            continue
        copies = n_copies(operation.n_bytes, n_processes)
        in_turns = partial(_in_turns, copies=copies, window_s=window_s, meet=meet)
        seconds = _guarded(operation, found, device, in_turns)
        if seconds is not None:
            found.add(operation.table, operation.key, n_processes, seconds)
    tell("what Python adds to an operator")
    steps = 3 if cases.window_s > 0.01 else 1
    found.host = _host_seconds(found, device, cases.dtypes[0], steps, meet)
    return found


def n_copies(n_bytes: float, n_processes: int) -> int:
    """Returns how many copies of its tensors an operation uses in turn.

    A training step comes back to a weight after all others, and to an activation in its backward
    pass. So the tensors of all processes together are made larger than caches.

    Args:
        n_bytes: About the memory of one copy.
        n_processes: How many processes measure at the same time.
    """
    return max(1, min(_MOST_COPIES, math.ceil(_BEYOND_CACHES / n_processes / max(n_bytes, 1))))


def _in_turns(new: Callable[[], Run], copies: int, window_s: float, meet: Meet) -> float:
    return cpu_seconds([new() for _ in range(copies)], window_s, meet)


def average_times(found: Measurements, everyone: Axis) -> None:
    """Replaces times by their means over all processes, which call this together."""
    own = torch.tensor([*found.times(), *found.host], dtype=torch.float64)
    mean = (comm.all_reduce(own, everyone) / everyone.size).tolist()
    n_rows = len(found.times())
    found.set_times(mean[:n_rows])
    found.host = mean[n_rows:]


def _guarded(
    operation: Operation,
    found: Measurements,
    device: torch.device,
    measure: Callable[[Callable[[], Run]], float],
) -> float | None:
    """Returns the seconds of an operation, or None after noting why it could not be measured."""
    try:
        if device.type == "cuda" and operation.n_bytes > 0.9 * _free(device):
            raise MemoryError(f"needs {operation.n_bytes / 2**30:.1f} GiB")
        return measure(lambda: operation.build(device))
    except Exception as error:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        first = (str(error).splitlines() or [""])[0][:160]
        found.failures.append(f"{operation}: {type(error).__name__}: {first}")
        return None


def _free(device: torch.device) -> float:
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(free + cached)


def _host_seconds(
    found: Measurements, device: torch.device, dtype: str, steps: int, meet: Meet
) -> list[float]:
    """Returns seconds per kernel and per step, or nothing after noting why."""
    try:
        host = measure_host(device, dtype, steps, meet)
    except Exception as error:
        found.failures.append(f"time of the host: {type(error).__name__}: {error}")
        return []
    return [host.launch_s, host.step_s]


def _heater(device: torch.device) -> Callable[[], None]:
    """Returns a function that launches products for about 10 ms on an H100."""
    x = torch.randn(_HEAT, _HEAT, device=device, dtype=torch.bfloat16)

    def heat() -> None:
        for _ in range(_HEAT_CALLS):
            x @ x

    return heat


def _hot(run: Run, heat: Callable[[], None], window_s: float) -> float:
    """Times a call on a GPU that has just computed products, as in training."""
    heat()
    return gpu_seconds(run, window_s)
