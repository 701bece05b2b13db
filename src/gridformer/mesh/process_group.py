"""The process group of a run: choosing device and backend, joining it, and leaving it."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from gridformer.mesh.gpus import (
    CPU,
    GPU,
    device_or_problem,
    identity,
    n_visible_gpus,
    own_gpu,
    too_few_gpus,
)
from gridformer.mesh.launch_env import rank_env
from gridformer.mesh.rendezvous import share_result, store_of, wait_until_heard
from gridformer.utils.errors import UserError
from gridformer.utils.process import n_cores
from gridformer.utils.units import counted

if TYPE_CHECKING:  # torch takes a second to import, and the command line imports this file
    import torch

DeviceChoice = Literal["auto", "cpu", "cuda"]
_PRODUCT = "rows x cols x branches x dp x pp"
_HEARD_S = 60.0  # how long rank 0, which may serve the store, waits for the others before it ends
_ABORT_S = 2.0  # an abort that takes longer is considered hung
_MOST_HERE = 256  # processes that one machine starts, however few cores it has


@dataclass(frozen=True)
class World:
    """This process's place among all processes of the run.

    `backend` is "nccl", "gloo", or "none" for a run of one process, which has no process group.
    `why` is a phrase that says how device and backend were chosen.
    """

    rank: int
    local_rank: int
    size: int
    device: torch.device
    backend: str
    why: str


def check_devices(
    device: DeviceChoice, n_processes: int, nproc: int | None = None, elastic: bool = False
) -> list[str]:
    """Checks whether `n_processes` can start from this process; with `elastic` it may be more."""
    problems = []
    place = rank_env()
    if nproc is not None and nproc != n_processes:
        problems.append(
            f"--nproc={nproc}, but the layout needs {counted(n_processes, 'process')} "
            f"({_PRODUCT}): leave --nproc out, or change the layout"
        )
    if place and place.size != n_processes and not (elastic and place.size > n_processes):
        problems.append(
            f"{place.by} started {counted(place.size, 'process')}, but the layout needs "
            f"{n_processes} ({_PRODUCT}): start {n_processes}, or change the layout"
        )
    most = max(_MOST_HERE, 32 * n_cores())
    if not place and n_processes > most:
        problems.append(
            f"the layout needs {n_processes} processes ({_PRODUCT}), and one machine with "
            f"{n_cores()} cores starts at most {most}: start them on several machines with "
            "torchrun or srun, or change the layout"
        )
    if not problems and (device == "cuda" or (device == "auto" and place and n_visible_gpus())):
        problems += too_few_gpus(place, place.local_size if place else n_processes)
    return problems


def init_process_groups(
    device: DeviceChoice, n_processes: int, timeout_s: float, margin_s: float = 0.0
) -> World:
    """Joins the process group of the run from inside a worker and chooses this process's device.

    `auto` uses CUDA with NCCL if every machine has a GPU for each of its processes, and the CPU
    with gloo if none has. A run of one process gets a device but no process group.

    Args:
        timeout_s: Seconds after which a collective that still waits raises.
        margin_s: Seconds by which torch's own timeout is longer, so that a watch ends the wait
            first. NCCL counts from when a message was queued, which may be a whole step before the
            host waits, so its timeout is longer by `timeout_s` again.

    Raises:
        UserError: The number of processes is wrong, `cuda` was requested and there are too few
            GPUs, or only some of the processes have a GPU of their own.
    """
    import torch.distributed as dist

    place = rank_env()
    gpu = None if device == "cpu" else own_gpu(place)
    if (place.size if place else 1) != n_processes or (device == "cuda" and gpu is None):
        problems = check_devices(device, n_processes) or [
            f"the layout needs {counted(n_processes, 'process')}: start them with "
            "gridformer.launch.launch, torchrun or srun"
        ]
        raise UserError("; ".join(problems))
    if place is None or n_processes == 1:
        return World(0, 0, 1, _take(gpu), "none", f"one process on {_why(gpu, device)}")

    timeout = timedelta(seconds=timeout_s + margin_s)
    store = store_of(place)
    store.set_timeout(timeout)
    judgment = share_result(place, "gpu", identity(gpu, place.rank), device_or_problem)
    if judgment not in (CPU, GPU):  # unequal backends would make the run hang
        if place.rank == 0:
            wait_until_heard(place, "gpu", _HEARD_S)
        raise UserError(judgment)
    backend = "gloo" if gpu is None else "nccl"
    # Messages between stages have groups of their own, as what torch would print recommends.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    if backend == "nccl" and margin_s:
        timeout += timedelta(seconds=timeout_s)
    chosen = _take(gpu)
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=timeout,
        device_id=None if gpu is None else chosen,
    )
    why = f"{place.size} processes over {backend} on {_why(gpu, device, place.local_size)}"
    return World(place.rank, place.local_rank, place.size, chosen, backend, why)


def close_process_groups() -> None:
    """Destroys the process group, if there is one; after a failure `abandon_process_groups`."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def abandon_process_groups() -> None:
    """Abandons the process group after a failure, without waiting for any peer.

    The peers may be inside a collective that this rank will never enter. Destroying an NCCL group
    would then wait until train.timeout_s is over, so this aborts NCCL instead, and goes on after a
    while even if the abort hangs. With gloo nothing needs to be done: its sockets close when this
    process ends, which must be soon, and its peers notice that at once.
    """
    import torch.distributed as dist

    from gridformer.utils.torch_private import abort_groups

    if not dist.is_initialized() or "nccl" not in dist.get_backend():
        return

    def abort() -> None:
        with contextlib.suppress(Exception):  # the failure has already been reported
            abort_groups()

    thread = threading.Thread(target=abort, name="abort", daemon=True)
    with contextlib.suppress(RuntimeError):  # no memory is left for its stack
        thread.start()
        thread.join(_ABORT_S)


def is_effect_of_a_peer(error: BaseException) -> bool:
    """Returns whether this rank failed only because a peer did, which reports or is the cause."""
    import torch.distributed as dist

    signs = ("closed by peer", "reset by peer", "Broken pipe", "Socket closed", "gloo/transport")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )


def is_gpu_error(error: BaseException) -> bool:
    """Returns whether a GPU has failed, such as by an assertion in a kernel, and stays unusable."""
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)


def _take(gpu: int | None) -> torch.device:
    import torch

    if gpu is None:
        return torch.device("cpu")
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)


def _why(gpu: int | None, device: DeviceChoice, n_local: int = 1) -> str:
    import torch

    if gpu is not None:
        return f"CUDA ({torch.cuda.get_device_name(gpu)})"
    if device == "cpu":
        return "CPU (train.device=cpu)"
    if not torch.cuda.is_available():
        return "CPU (torch finds no GPU)"
    n = torch.cuda.device_count()
    return (
        f"CPU ({n} GPU{'s' * (n > 1)} for {n_local} processes are too few: a layout of at most {n} "
        "would run on GPUs)"
    )
