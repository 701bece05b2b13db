"""Checks whether this machine can train: packages, hardware, and whether processes connect."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gridformer import __version__
from gridformer.mesh.gpus import nccl_version
from gridformer.utils.process import free_memory, n_cores
from gridformer.utils.units import GIB

if TYPE_CHECKING:
    from gridformer.config import LayoutConfig

_BIG_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Finding:
    """One line of the report. `remedy` says how to fix what is wrong."""

    level: Literal["ok", "warn", "bad"]
    text: str
    remedy: str = ""


def _judged(well: bool, text: str, remedy: str) -> Finding:
    return Finding("ok", text) if well else Finding("warn", text, remedy)


def examine(n_processes: int, timeout_s: float, folder: Path = Path()) -> Iterator[Finding]:
    """Runs all checks and yields each finding as soon as it is known, causes before effects.

    It connects processes, which hang if it takes `timeout_s`. Runs would be written to `folder`.
    """
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "packages": check_packages,
        "CPU and memory": check_machine,
        "GPUs": check_gpus,
        "loopback network": check_loopback,
        "shared memory": lambda: check_shared_memory(Path("/dev/shm"), n_processes),
        "disk": lambda: check_disk(folder),
        "processes": lambda: check_processes(n_processes, timeout_s),
    }
    python = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("ok", python)  # an older one than gridformer needs would not come so far
    for name, check in checks.items():
        try:
            yield from check()
        except Exception as error:  # whatever it is, the other checks are still useful
            text = f"{name}: the check failed ({type(error).__name__}: {error})"
            remedy = "if that does not tell you the cause, report it with this output"
            yield Finding("bad", text, remedy)


def check_packages(requirements: list[str] | None = None) -> Iterator[Finding]:
    """Compares installed versions with requirements, by default those of the installed package."""
    if requirements is None:
        try:
            requirements = metadata.requires("gridformer") or []
        except metadata.PackageNotFoundError:
            remedy = "run `pip install -e .` in the checkout so that versions can be checked"
            yield Finding("warn", "gridformer is not installed as a package", remedy)
            return
    from packaging.requirements import Requirement

    fitting = [f"gridformer {__version__}"]
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        spec = f"{wanted.name}{wanted.specifier}"
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            wrong = f"{wanted.name} is missing"
        else:
            if wanted.specifier.contains(version, prereleases=True):
                fitting.append(f"{wanted.name} {version}")
                continue
            wrong = f"{wanted.name} {version} does not satisfy {spec}"
        yield Finding("bad", wrong, f"pip install '{spec}'")
    yield Finding("ok", ", ".join(fitting))


def check_machine() -> Iterator[Finding]:
    """Counts CPU cores and checks the free memory, where the system tells it."""
    cores, free = n_cores(), free_memory()
    text = f"{cores} CPU core{'s' * (cores != 1)}"
    if free is not None:
        text += f", {free / GIB:.1f} GiB of memory free"
    remedy = "close other programs: each process needs about 0.4 GiB before any model"
    yield _judged(free is None or free >= 2 * GIB, text, remedy)


def check_gpus() -> Iterator[Finding]:
    """Lists GPUs with their memory, and checks that torch can use them and NCCL."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        remedy = f"torch's CUDA {torch.version.cuda} needs a newer driver: see nvidia-smi"
        if torch.version.cuda is None:
            remedy = "this build of torch has no CUDA: install one from pytorch.org"
        if shutil.which("nvidia-smi"):
            yield Finding("warn", "an NVIDIA driver is installed, but torch finds no GPU", remedy)
        else:
            yield Finding("ok", "no GPU: training uses the CPU, with gloo between processes")
        return
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        name = torch.cuda.get_device_name(i)
        yield Finding("ok", f"GPU {i}: {name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free")
    if dist.is_nccl_available():
        version = ".".join(str(part) for part in nccl_version() or torch.cuda.nccl.version())
        yield Finding("ok", f"NCCL {version} between GPUs")
    else:
        remedy = "install a CUDA build of torch for Linux to train on several GPUs"
        yield Finding("warn", "this build of torch lacks NCCL", remedy)


def check_loopback() -> Iterator[Finding]:
    """Checks that a TCP connection to 127.0.0.1 works."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5.0),
        ):
            yield Finding("ok", "the loopback network connects")
    except OSError as error:
        remedy = "allow TCP connections to 127.0.0.1, which a firewall or a sandbox forbids"
        yield Finding("bad", f"the loopback network does not connect ({error})", remedy)


def check_shared_memory(folder: Path, n_processes: int) -> Iterator[Finding]:
    """Checks that the shared memory mounted at `folder` has 64 MiB free for each process."""
    if not folder.is_dir():  # only Linux has it
        return
    if not os.access(folder, os.W_OK):
        remedy = f"make {folder} writable: chmod 1777 {folder}"
        yield Finding("bad", f"shared memory ({folder}) cannot be written", remedy)
        return
    free = shutil.disk_usage(folder).free
    remedy = "in a container, use docker run --shm-size=8g (NCCL and data loaders need it)"
    text = f"shared memory ({folder}): {free / GIB:.2f} GiB free"
    yield _judged(free >= 64 * 2**20 * n_processes, text, remedy)


def check_disk(folder: Path) -> Iterator[Finding]:
    """Checks that `folder` can be written and that 5 GiB of its disk are free."""
    folder = folder.absolute()
    free = shutil.disk_usage(folder).free
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = "change to a folder that you can write, or train with --out elsewhere"
        yield Finding("warn", f"{folder} cannot be written ({error.strerror})", remedy)
        return
    remedy = "free some, or train with --out on another disk: a parameter takes 12 bytes there"
    yield _judged(free >= 5 * GIB, f"disk: {free / GIB:.1f} GiB free in {folder}", remedy)


_PROBE = """
import sys
from pathlib import Path
from gridformer.launch import launch
from gridformer.doctor import probe
if __name__ == "__main__":
    n, timeout_s, answer = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    launch(probe, (n, timeout_s, answer), n)
"""


def check_processes(n: int, timeout_s: float, program: str = _PROBE) -> Iterator[Finding]:
    """Connects n processes as training does, in a child process that is killed after a timeout.

    The program starts the processes; its words are the arguments of `probe`.
    """
    if n == 1:
        yield Finding("ok", "one process: nothing to connect")
        return
    layout = grid(n)
    what = f"{n} processes as a {layout.rows}x{layout.cols} grid"
    with tempfile.TemporaryDirectory(prefix="gridformer-doctor-") as folder:
        answer = Path(folder) / "answer.json"
        # The group's own timeout is shorter, so that a hung collective can report where it hangs.
        arguments = [str(n), str(0.7 * timeout_s), str(answer)]
        code, errors = _run([sys.executable, "-c", program, *arguments], timeout_s)
        if code is None:
            remedy = (
                "look for a firewall between local processes, try GLOO_SOCKET_IFNAME=lo (or "
                "NCCL_P2P_DISABLE=1 on GPUs), or increase --timeout if the machine is busy"
            )
            yield Finding("bad", f"{what}: no answer within {timeout_s:g} s", remedy)
            return
        if code != 0 or not answer.exists():
            last = errors.strip().splitlines()[-1:] or ["no message"]
            remedy = "the full message is:\n" + errors.strip()
            yield Finding("bad", f"{what}: failed ({last[0]})", remedy)
            return
        answers = json.loads(answer.read_text())
    if wrong := "; ".join(answers["wrong"]):
        remedy = "do not train; on GPUs try NCCL_P2P_DISABLE=1, else report it with this output"
        yield Finding("bad", f"{what}: wrong sums: {wrong}", remedy)
        return
    yield Finding("ok", f"{what}: sums along rows, columns and all are right")
    yield Finding("ok", f"chosen: {answers['why']}")
    speed = _BIG_BYTES / answers["big_s"] / 1e9
    yield Finding(
        "ok",
        f"all-reduce over {n} processes: 4 bytes in {1e3 * answers['small_s']:.2f} ms, 16 MiB in "
        f"{1e3 * answers['big_s']:.0f} ms ({speed:.2f} GB/s)",
    )


def _run(command: list[str], timeout_s: float) -> tuple[int | None, str]:
    """Runs a command and returns its exit code (None for a timeout) and its error output.

    No process of it is left when this returns or raises.
    """
    # None lets the child conclude that torchrun or srun started it.
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(launched)}
    process = subprocess.Popen(
        command,
        env=inherited,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=timeout_s)
        return process.returncode, errors
    except BaseException as error:  # also Ctrl-C, which does not reach the new session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return None, ""
        raise


def grid(n_processes: int) -> LayoutConfig:
    """Returns the layout of the most square grid of n processes: 2x2 for 4, 2x3 for 6."""
    from gridformer.config import LayoutConfig, divisors

    rows = max(d for d in divisors(n_processes) if d * d <= n_processes)
    return LayoutConfig(scheme="optimus", rows=rows, cols=n_processes // rows)


def probe(n_processes: int, timeout_s: float, answer: Path) -> None:
    """The entrypoint of each process: checks sums over the grid and times all-reduces.

    Rank 0 writes the JSON file `answer`: `why` (device and backend in words), `wrong` (sentences),
    `small_s` and `big_s` (median seconds of an all-reduce of 4 bytes and of 16 MiB).
    """
    import torch

    from gridformer.comm import all_reduce
    from gridformer.mesh.groups import objects_group
    from gridformer.mesh.process_group import close_process_groups, init_process_groups
    from gridformer.parallel.axes import build_axes
    from gridformer.utils.tensors import DeviceEvent

    world = init_process_groups("auto", n_processes, timeout_s)
    axes = build_axes(grid(n_processes), world.device.type)
    mine = torch.zeros(n_processes, dtype=torch.float64, device=world.device)
    mine[world.rank] = world.rank + 1
    wrong = []
    # Over NCCL, checkpoints send objects over gloo, which needs connections of its own.
    objects = replace(axes.world, group=objects_group())
    for axis, on in ((axes.row, mine), (axes.col, mine), (axes.world, mine), (objects, mine.cpu())):
        got = all_reduce(on.clone(), axis)
        step = {"row": axes.col.size, "col": 1, "world": 1}[axis.name]
        first = world.rank - axis.index * step
        members = {first + i * step for i in range(axis.size)}
        expected = [r + 1.0 if r in members else 0.0 for r in range(n_processes)]
        if got.tolist() != expected:
            wrong.append(f"rank {world.rank} along {axis.name}: {got.tolist()}, not {expected}")

    def seconds(n_bytes: int, repeats: int) -> float:
        x = torch.ones(n_bytes // 4, device=world.device)
        times = []
        for _ in range(repeats):
            x.fill_(1.0)
            start = DeviceEvent(world.device)
            all_reduce(x, axes.world)
            times.append(DeviceEvent(world.device).seconds_since(start))
        return statistics.median(times[repeats // 4 :])  # the first ones set up connections

    small_s, big_s = seconds(4, 40), seconds(_BIG_BYTES, 12)
    n_wrong = int(all_reduce(torch.tensor(len(wrong), device=world.device), axes.world))
    if n_wrong and not wrong:
        wrong = [f"{n_wrong} sums on other ranks"]
    if world.rank == 0:
        told = {"why": world.why, "wrong": wrong, "small_s": small_s, "big_s": big_s}
        answer.write_text(json.dumps(told))
    close_process_groups()
