"""Measures the whole machine, with the processes that `gridformer train` would start on it."""

from __future__ import annotations

import contextlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridformer.calibrate.cases import Cases, cpu_cases, gpu_cases, quick_cases
from gridformer.calibrate.found import Measurements
from gridformer.cluster import Cluster, Device, Figure, Host, Level
from gridformer.launch import launch
from gridformer.utils.errors import UserError
from gridformer.utils.hardware import free_memory, n_cores
from gridformer.utils.units import GIB

if TYPE_CHECKING:
    import torch

Tell = Callable[[str], None]
CPU_COUNTS = (1, 2, 4, 8, 16)
MOST_LOCAL = 64  # processes on one machine with a CPU that the file describes


def calibrate(
    counts: Sequence[int], quick: bool, limit_s: float, tell: Tell
) -> tuple[Cluster, list[str]]:
    """Measures this machine.

    Args:
        counts: Numbers of processes that share a CPU; empty means 1, 2, 4, 8 and 16.
        quick: Whether to measure a few tiny cases only, to try the code.
        limit_s: On a GPU, seconds after which the remaining kernels are left out.
        tell: Receives progress messages.

    Returns:
        The cluster, and sentences on what could not be measured.

    Raises:
        UserError: Nothing could be measured.
        SystemExit: A process failed, or a signal stopped it; see `launch`.
    """
    import torch

    if torch.cuda.is_available():
        found, cluster = _calibrate_gpu(quick, limit_s, tell)
    else:
        found, cluster = _calibrate_cpu(counts or CPU_COUNTS, quick, tell)
    return cluster, found.failures


def _source(device: str) -> str:
    import torch

    return (
        f"measured by gridformer calibrate on {date.today():%Y-%m-%d}, {device}, torch "
        f"{torch.__version__}"
    )


# --------------------------------------------------------------------------- CPU


def _calibrate_cpu(counts: Sequence[int], quick: bool, tell: Tell) -> tuple[Measurements, Cluster]:
    cases = quick_cases(cpu_cases()) if quick else cpu_cases()
    found, began = Measurements(), time.monotonic()
    for n in counts:
        who = "1 process" if n == 1 else f"{n} processes at the same time"
        tell(f"{who} ({time.monotonic() - began:.0f} s so far)")
        with tempfile.TemporaryDirectory(prefix="gridformer-calibrate-") as folder:
            out = Path(folder) / "found.json"
            launch(cpu_worker, (n, cases, out), n)
            found.extend(Measurements.read(out))
    return found, cpu_cluster(found)


def cpu_worker(n: int, cases: Cases, out: Path) -> None:
    """The entrypoint of each of n processes that measure at the same time. Rank 0 writes `out`.

    Args:
        n: How many processes measure.
        cases: What they measure.
        out: Where rank 0 writes the measurements, for `Measurements.read`.
    """
    import torch

    from gridformer import comm
    from gridformer.calibrate.device import average_times, measure_cpu
    from gridformer.mesh.axes import Axis
    from gridformer.mesh.process_group import close_process_groups, init_process_groups

    world = init_process_groups("cpu", n, 600.0)
    everyone = Axis("world", n, world.rank)

    def tell(text: str) -> None:
        if world.rank == 0:
            print(f"  {text}", file=sys.stderr, flush=True)

    few = n > max(2, n_cores())
    found = measure_cpu(cases, n, few, n_cores(), lambda: comm.barrier((everyone,)), tell)
    if n > 1:
        average_times(found, everyone)
        tell("messages")
        _measure_messages(found, cases, n, world.rank, torch.device("cpu"))
        found.backend = world.backend
    found.add_host(n)
    if world.rank == 0:
        found.write(out)
    close_process_groups()


def cpu_cluster(found: Measurements) -> Cluster:
    """Returns the cluster file of this CPU with these measurements."""
    name = _processor()
    source = _source(f"{name}, {n_cores()} cores, gloo")
    memory = free_memory()
    device = Device(
        name=f"a process on {name}",
        kind="cpu",
        n_processors=Figure(value=1, source="a process"),
        memory_gib=Figure(
            value=round((memory or 0) / GIB, 2),
            source=f"free memory, which all processes share, {source}",
        ),
        reserved_gib=Figure(value=0, source="what is free is left for training"),
        **_rates(found, source),
    )
    cluster = _cluster("local", device, found, source, MOST_LOCAL)
    cores = Figure(value=n_cores(), source=source)
    host = cluster.host.model_copy(update={"cores": cores})
    return cluster.model_copy(update={"host": host})


# --------------------------------------------------------------------------- GPU


def _calibrate_gpu(quick: bool, limit_s: float, tell: Tell) -> tuple[Measurements, Cluster]:
    import torch

    from gridformer.calibrate.device import measure_gpu

    began = time.monotonic()
    cases = quick_cases(gpu_cases()) if quick else gpu_cases()
    torch.ones(1024, 1024, device="cuda") @ torch.ones(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    reserved = total - free - torch.cuda.memory_reserved()
    found = measure_gpu(cases, limit_s, tell)
    found.add_host(1)
    n = torch.cuda.device_count()
    if n == 1:
        tell("one GPU: messages between GPUs are not measured")
    counts = sorted({d for d in (2, 4, 8, n) if 1 < d <= n})
    for count in counts:
        tell(f"messages between {count} GPUs ({time.monotonic() - began:.0f} s so far)")
        with tempfile.TemporaryDirectory(prefix="gridformer-calibrate-") as folder:
            out = Path(folder) / "found.json"
            launch(gpu_worker, (count, cases, out), count)
            found.extend(Measurements.read(out))
    properties = torch.cuda.get_device_properties(0)
    source = _source(f"{n} x {properties.name}, CUDA {torch.version.cuda}")
    device = Device(
        name=properties.name,
        kind="cuda",
        n_processors=Figure(value=properties.multi_processor_count, source=source),
        memory_gib=Figure(value=round(total / GIB, 3), source=source),
        reserved_gib=Figure(
            value=round(max(0, reserved) / GIB, 3),
            source=f"CUDA's context and libraries, without NCCL's buffers, {source}",
        ),
        **_rates(found, source),
    )
    return found, _cluster("local", device, found, source, n)


def gpu_worker(n: int, cases: Cases, out: Path) -> None:
    """The entrypoint of each of n processes with a GPU each, which measure messages.

    Args:
        n: How many processes send messages.
        cases: What they measure.
        out: Where rank 0 writes the measurements, for `Measurements.read`.
    """
    from gridformer.mesh.process_group import close_process_groups, init_process_groups

    world = init_process_groups("cuda", n, 600.0)
    found = Measurements(backend=world.backend)
    _measure_messages(found, cases, n, world.rank, world.device)
    if world.rank == 0:
        found.write(out)
    close_process_groups()


# --------------------------------------------------------------------------- both


def _measure_messages(
    found: Measurements, cases: Cases, n: int, rank: int, device: torch.device
) -> None:
    """Adds the times of messages in groups of several sizes; all ranks call this together."""
    from gridformer.calibrate.messages import axes_of, message_seconds, sends_of
    from gridformer.mesh.axes import Axis

    world, gpu = Axis("world", n, rank), device.type == "cuda"
    for members, axis in axes_of(n, rank).items():
        if gpu and members < n:
            continue  # smaller groups are measured alone, because each GPU has its own links
        for op, send in sends_of(axis, device).items():
            for n_bytes in cases.messages:
                seconds = message_seconds(send(n_bytes), cases.window_s, world, gpu)
                row = [op, 1 if gpu else n, members, 1, 1, n_bytes, round(1e6 * seconds, 3)]
                found.rows.setdefault("messages", []).append(row)


def _rates(found: Measurements, source: str) -> dict[str, Any]:
    """Returns the highest rates that were measured, which formulas use where no table helps."""
    tables = found.tables(source)
    if not tables.products or not tables.memory:
        raise UserError("nothing could be measured: " + "; ".join(found.failures))
    peaks: dict[str, float] = {}
    for row in tables.products:
        rate = 2e-6 * row.batch * row.m * row.n * row.k / row.us
        peaks[row.dtype] = max(peaks.get(row.dtype, 0.0), rate)
    gbps = max(1e-3 * row.bytes / row.us for row in tables.memory if row.op == "copy_")
    return {
        "peak_tflops": {
            dtype: Figure(value=_digits(rate), source=f"fastest product, {source}")
            for dtype, rate in peaks.items()
        },
        "memory_gbps": Figure(value=_digits(gbps), source=f"fastest copy, {source}"),
    }


def _cluster(name: str, device: Device, found: Measurements, source: str, size: int) -> Cluster:
    tables = found.tables(source)
    host, said = min(tables.host, default=None), source
    if host is None:
        said = "not measured, see the messages of gridformer calibrate; taken as 0"
    sends = [row for row in tables.messages if row.op == "send"]
    if sends:
        # For a CPU those of two processes alone, which are the fastest.
        fewest = [row for row in sends if row.processes == min(r.processes for r in sends)]
        gbps = Figure(
            value=_digits(max(1e-3 * row.bytes / row.us for row in fewest)),
            source=f"largest message from one process to another, {source}",
        )
        latency = Figure(
            value=_digits(min(row.us for row in fewest)), source=f"smallest message, {source}"
        )
    else:
        gbps = Figure(value=1.0, source="not measured: one device has no messages; a placeholder")
        latency = Figure(value=0.0, source="not measured: one device has no messages")
    return Cluster(
        name=name,
        device=device,
        levels=(
            Level(
                name="node",
                size=size,
                bandwidth_gbps=gbps,
                latency_us=latency,
                source="size, assumed: more processes than it runs"
                if device.kind == "cpu"
                else f"size: the GPUs of this machine, {source}",
            ),
        ),
        host=Host(
            launch_us=Figure(value=host.launch_us if host else 0.0, source=said),
            step_us=Figure(value=host.step_us if host else 0.0, source=said),
            message_us=Figure(value=0.0, source="part of latency_us and of the tables"),
        ),
        tables=tables,
    )


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
