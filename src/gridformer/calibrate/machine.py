"""Measures the whole machine, with the processes that `gridformer train` would start on it, and
writes a cluster file.
"""

from __future__ import annotations

import contextlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import yaml

from gridformer import comm
from gridformer.calibrate.device import Measurements, Tell, measure_cpu, measure_gpu
from gridformer.calibrate.messages import axes_of, message_seconds, sends_of
from gridformer.calibrate.operations import Cases, cpu_cases, gpu_cases, quick_cases
from gridformer.cluster import tables as t
from gridformer.cluster.file import Cluster, Device, Figure, Host, Level
from gridformer.launch import launch
from gridformer.mesh.axes import Axis
from gridformer.mesh.process_group import World, close_process_groups, init_process_groups
from gridformer.utils.errors import UserError
from gridformer.utils.files import write_text
from gridformer.utils.process import free_memory, n_cores
from gridformer.utils.units import GIB

CPU_COUNTS = (1, 2, 4, 8, 16)
MOST_LOCAL = 64  # processes on one machine with a CPU that the file describes
_HEAD = """\
# Written by `gridformer calibrate`, for `gridformer predict` and `gridformer plan --cluster FILE`.
# Rows of the tables have microseconds at their end; the columns are those below.
"""
_ROWS: dict[str, Any] = {
    "products": t.ProductRow,
    "attention": t.AttentionRow,
    "memory": t.MemoryRow,
    "messages": t.MessageRow,
    "host": t.HostRow,
}


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
        SystemExit: A process failed, or a signal stopped it.
    """
    if torch.cuda.is_available():
        return _calibrate_gpu(quick, limit_s, tell)
    cases = quick_cases(cpu_cases()) if quick else cpu_cases()
    result, began = Measurements(), time.monotonic()
    for n in counts or CPU_COUNTS:
        who = "1 process" if n == 1 else f"{n} processes at the same time"
        tell(f"{who} ({time.monotonic() - began:.0f} s so far)")
        result.extend(_launched(cpu_worker, n, cases))
    return cpu_cluster(result), result.failures


def _launched(worker: Callable[[int, Cases, Path], None], n: int, cases: Cases) -> Measurements:
    """Returns what n processes measure at the same time."""
    with tempfile.TemporaryDirectory(prefix="gridformer-calibrate-") as folder:
        out = Path(folder) / "measurements.json"
        launch(worker, (n, cases, out), n)
        return Measurements.read(out)


def cpu_worker(n: int, cases: Cases, out: Path) -> None:
    """The entrypoint of each of n processes that measure at the same time. Rank 0 writes `out`."""
    world = init_process_groups("cpu", n, 600.0)
    everyone = Axis("world", n, world.rank)

    def tell(text: str) -> None:
        if world.rank == 0:
            print(f"  {text}", file=sys.stderr, flush=True)

    few = n > max(2, n_cores())
    result = measure_cpu(cases, n, few, n_cores(), lambda: comm.barrier((everyone,)), tell)
    if n > 1:
        result.average(everyone)
        tell("messages")
        _measure_messages(result, cases, n, world)
    result.add_host(n)
    if world.rank == 0:
        result.write(out)
    close_process_groups()


def gpu_worker(n: int, cases: Cases, out: Path) -> None:
    """The entrypoint of each of n processes with a GPU each, which measure messages."""
    world = init_process_groups("cuda", n, 600.0)
    result = Measurements()
    _measure_messages(result, cases, n, world)
    if world.rank == 0:
        result.write(out)
    close_process_groups()


def _measure_messages(result: Measurements, cases: Cases, n: int, world: World) -> None:
    """Adds the times of messages in groups of several sizes; all ranks call this together."""
    result.backend = world.backend
    everyone, gpu = Axis("world", n, world.rank), world.device.type == "cuda"
    for members, axis in axes_of(n, world.rank).items():
        if gpu and members < n:
            continue  # smaller groups are measured alone, because each GPU has its own links
        for op, send in sends_of(axis, world.device).items():
            for n_bytes in cases.messages:
                seconds = message_seconds(send(n_bytes), cases.window_s, everyone, gpu)
                row = [op, 1 if gpu else n, members, 1, 1, n_bytes, round(1e6 * seconds, 3)]
                result.rows.setdefault("messages", []).append(row)


def _calibrate_gpu(quick: bool, limit_s: float, tell: Tell) -> tuple[Cluster, list[str]]:
    began = time.monotonic()
    cases = quick_cases(gpu_cases()) if quick else gpu_cases()
    torch.ones(1024, 1024, device="cuda") @ torch.ones(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    reserved = total - free - torch.cuda.memory_reserved()
    result = measure_gpu(cases, limit_s, tell)
    result.add_host(1)
    n = torch.cuda.device_count()
    if n == 1:
        tell("one GPU: messages between GPUs are not measured")
    for count in sorted({d for d in (2, 4, 8, n) if 1 < d <= n}):
        tell(f"messages between {count} GPUs ({time.monotonic() - began:.0f} s so far)")
        result.extend(_launched(gpu_worker, count, cases))
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
        **_rates(result, source),
    )
    return _cluster(device, result, source, n), result.failures


# --------------------------------------------------------------------------- the cluster file


def cpu_cluster(result: Measurements) -> Cluster:
    """Returns the cluster file of this CPU with these measurements."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        models = (one.partition(":")[2].strip() for one in lines if one.startswith("model name"))
        name = next(models, name)
    source = _source(f"{name}, {n_cores()} cores, gloo")
    device = Device(
        name=f"a process on {name}",
        kind="cpu",
        n_processors=Figure(value=1, source="a process"),
        memory_gib=Figure(
            value=round((free_memory() or 0) / GIB, 2),
            source=f"free memory, which all processes share, {source}",
        ),
        reserved_gib=Figure(value=0, source="what is free is left for training"),
        **_rates(result, source),
    )
    cluster = _cluster(device, result, source, MOST_LOCAL)
    cores = Figure(value=n_cores(), source=source)
    return cluster.model_copy(update={"host": cluster.host.model_copy(update={"cores": cores})})


def _source(device: str) -> str:
    today = f"{date.today():%Y-%m-%d}"
    return f"measured by gridformer calibrate on {today}, {device}, torch {torch.__version__}"


def _rates(result: Measurements, source: str) -> dict[str, Any]:
    """Returns the highest rates that were measured, which formulas use where no table helps."""
    tables = result.tables(source)
    if not tables.products or not tables.memory:
        raise UserError("nothing could be measured: " + "; ".join(result.failures))
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


def _cluster(device: Device, result: Measurements, source: str, size: int) -> Cluster:
    tables = result.tables(source)
    host, said = min(tables.host, default=None), source
    if host is None:
        said = "not measured, see the messages of gridformer calibrate; taken as 0"
    gbps = Figure(value=1.0, source="not measured: one device has no messages; a placeholder")
    latency = Figure(value=0.0, source="not measured: one device has no messages")
    if sends := [row for row in tables.messages if row.op == "send"]:
        # For a CPU those of two processes alone, which are the fastest.
        fewest = [row for row in sends if row.processes == min(r.processes for r in sends)]
        rate, us = max(1e-3 * row.bytes / row.us for row in fewest), min(row.us for row in fewest)
        said_of = f"largest message from one process to another, {source}"
        gbps = Figure(value=_digits(rate), source=said_of)
        latency = Figure(value=_digits(us), source=f"smallest message, {source}")
    level = Level(
        name="node",
        size=size,
        bandwidth_gbps=gbps,
        latency_us=latency,
        source="size, assumed: more processes than it runs"
        if device.kind == "cpu"
        else f"size: the GPUs of this machine, {source}",
    )
    return Cluster(
        name="local",
        device=device,
        levels=(level,),
        host=Host(
            launch_us=Figure(value=host.launch_us if host else 0.0, source=said),
            step_us=Figure(value=host.step_us if host else 0.0, source=said),
            message_us=Figure(value=0.0, source="part of latency_us and of the tables"),
        ),
        tables=tables,
    )


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def write_cluster(cluster: Cluster, path: Path, busy: str = "") -> None:
    """Writes a cluster to a YAML file, which `load_cluster` reads; `busy` is that of `running`."""
    data: dict[str, Any] = cluster.model_dump(mode="json")
    data.pop("name")
    tables = data.pop("tables")
    head = yaml.safe_dump(data, sort_keys=False, width=1000, allow_unicode=True)
    lines = ["tables:", f"  source: {yaml.safe_dump(tables['source'], width=1000).splitlines()[0]}"]
    for name, row_type in _ROWS.items():
        if tables[name]:
            lines.append(f"  {name}:  # {', '.join(row_type._fields)}")
            lines += [f"    - [{', '.join(map(_text, row))}]" for row in tables[name]]
    path.parent.mkdir(parents=True, exist_ok=True)
    note = f"# Times are too long: when this began, {busy}.\n" if busy else ""
    write_text(path, _HEAD + note + head + "\n".join(lines) + "\n")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) and value < 1e6 else f"{value}"
