"""Which GPU each process of a run uses, and whether all of them have one of their own.

A launcher either lets each process see all GPUs of its machine, or only its own (`srun
--gpus-per-task`, --gpu-bind, CUDA_VISIBLE_DEVICES set for each task). What counts is what torch
sees, whatever the launcher calls it: as many GPUs as processes, or a single one.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from gridformer.mesh.launch_env import Joined

CPU, GPU = "cpu", "gpu"  # what `device_or_problem` returns if all is well


def own_gpu(place: Joined | None) -> int | None:
    """Returns the GPU of this process, or None if it has none of its own.

    Args:
        place: The place of this process in its run; None for a run of one process.
    """
    visible = _n_visible(place)
    local_rank, local_size = (place.local_rank, place.local_size) if place else (0, 1)
    if local_size <= visible:
        return None if place and not place.knows_local and visible > 1 else local_rank
    return 0 if visible == 1 and _may_be_bound(place) else None


def gpus_here(place: Joined | None, n_processes: int) -> list[int]:
    """Returns those of the visible GPUs that the run's processes on this machine use; maybe none.

    Args:
        place: The place of this process in its run; None if it starts the others.
        n_processes: Number of processes of the run.
    """
    if place is None:
        return [*range(n_processes)] if n_processes <= _n_visible(None, n_processes) else []
    mine = own_gpu(place)
    if mine is None:
        return []
    return [*range(place.local_size)] if place.local_size <= _n_visible(place) else [mine]


def too_few_gpus(place: Joined | None, n_local: int) -> list[str]:
    """Returns why `n_local` processes on this machine cannot each have a GPU; empty if they can.

    Args:
        place: The place of this process in its run; None if it starts the others.
        n_local: Number of processes of the run on this machine.
    """
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return [
            "train.device=cuda, but torch finds no GPU on this machine: use train.device=auto or "
            "cpu; `gridformer doctor` shows what torch finds"
        ]
    n_gpus = torch.cuda.device_count()
    if place and not place.knows_local and n_gpus > 1:
        return [
            f"this machine has {n_gpus} GPUs, and {place.by} did not say which one is this "
            "process's: set LOCAL_RANK and LOCAL_WORLD_SIZE, let CUDA_VISIBLE_DEVICES name one GPU "
            "for each process, or start the processes with torchrun or srun"
        ]
    if n_local > n_gpus and not (n_gpus == 1 and _may_be_bound(place)):
        return [
            f"more processes than devices: {n_local} processes on this machine and {n_gpus} "
            f"GPU{'s' * (n_gpus > 1)}: use a layout of at most {n_gpus}, or train.device=cpu"
        ]
    if n_local > 1 and not dist.is_nccl_available():
        return [
            "train.device=cuda with several processes needs NCCL, which this build of torch lacks: "
            "use train.device=cpu, or install a CUDA build of torch for Linux"
        ]
    return []


def identity(gpu: int | None, rank: int) -> str:
    """Returns a text that names this process's machine and GPU, for `device_or_problem`.

    Args:
        gpu: What `own_gpu` returned.
        rank: The global rank, which names a GPU that has no number of its own.
    """
    if gpu is None:
        return json.dumps([socket.gethostname(), ""])
    import torch

    try:
        name = str(torch.cuda.get_device_properties(gpu).uuid)
    except (AssertionError, AttributeError, RuntimeError):  # a device without such a number
        name = f"of rank {rank}"
    return json.dumps([socket.gethostname(), name])


def device_or_problem(identities: Sequence[str]) -> str:
    """Returns whether a run uses CPUs or GPUs, or a sentence that says why it cannot start.

    Args:
        identities: What `identity` returned on each rank.
    """
    found = [tuple(json.loads(text)) for text in identities]
    without = [rank for rank, (_, gpu) in enumerate(found) if not gpu]
    if len(without) == len(found):
        return CPU
    if without:
        rank = next(rank for rank, (_, gpu) in enumerate(found) if gpu)
        return (
            f"rank {without[0]} on {found[without[0]][0]} has no GPU of its own, but rank {rank} "
            f"on {found[rank][0]} has one ({len(without)} of {len(found)} ranks have none): start "
            "at most as many processes on a machine as it has GPUs, or use train.device=cpu"
        )
    (place, times), *_ = Counter(found).most_common(1)
    if times > 1:
        ranks = [str(rank) for rank, here in enumerate(found) if here == place]
        return (
            f"ranks {', '.join(ranks[:-1])} and {ranks[-1]} on {place[0]} all see the same single "
            "GPU: let the launcher give each its own (srun --gpus-per-task=1), or start one "
            "process for each GPU"
        )
    return GPU


def n_visible_gpus() -> int:
    """Returns the number of GPUs that torch sees. It loads torch if its build may see any."""
    if "torch" not in sys.modules:
        with contextlib.suppress(PackageNotFoundError):
            if version("torch").endswith("+cpu"):
                return 0  # saves loading torch, which takes a second
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _n_visible(place: Joined | None, n_processes: int = 1) -> int:
    """Returns the number of GPUs that a run of several processes, or of one, can use."""
    visible = n_visible_gpus()
    if not visible or (place.size if place else n_processes) == 1:
        return visible
    import torch.distributed as dist

    return visible if dist.is_nccl_available() else 0


def _may_be_bound(place: Joined | None) -> bool:
    """Whether processes may see different GPUs; those that gridformer starts see the same."""
    return place is not None and place.by != "gridformer.launch"
