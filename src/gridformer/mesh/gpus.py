"""Which GPU each process of a run uses, and whether all of them have one of their own.

A launcher either lets each process see all GPUs of its machine, or only its own (`srun
--gpus-per-task`, --gpu-bind, CUDA_VISIBLE_DEVICES set for each task). What counts is what torch
sees, whatever the launcher calls it: as many GPUs as processes, or a single one.

NCCL 2.30 and newer let several processes use the same GPU where NCCL_MULTI_RANK_GPU_ENABLE is 1.
Then gridformer does so too: layouts of many GPUs can be tried, with NCCL, on a machine with one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from gridformer.mesh.launch_env import RankEnv

CPU, GPU = "cpu", "gpu"  # what `device_or_problem` returns if all is well
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"  # the variable of NCCL that lets processes share GPUs
_SHARING_SINCE = (2, 30)


def gpus_are_shared() -> bool:
    """Returns whether several processes may use the same GPU, because `SHARING` is 1."""
    return os.environ.get(SHARING, "").strip() not in ("", "0")


def own_gpu(env: RankEnv | None) -> int | None:
    """Returns the GPU of this process, or None if it has none of its own."""
    visible = _n_visible(env)
    local_rank, local_size = (env.local_rank, env.local_size) if env else (0, 1)
    if local_size <= visible:
        return None if env and not env.knows_local and visible > 1 else local_rank
    if visible and gpus_are_shared():
        return local_rank % visible
    return 0 if visible == 1 and _may_be_bound(env) else None


def gpus_here(env: RankEnv | None, n_processes: int) -> list[int]:
    """Returns the visible GPUs that the run's processes on this machine use, perhaps none."""
    visible = _n_visible(env, n_processes)
    if env is None:
        enough = n_processes <= visible or gpus_are_shared()
        return [*range(min(n_processes, visible))] if enough else []
    mine = own_gpu(env)
    if mine is None:
        return []
    if gpus_are_shared():
        return [*range(min(env.local_size, visible))]
    return [*range(env.local_size)] if env.local_size <= visible else [mine]


def processes_on_a_gpu(env: RankEnv | None, n_processes: int) -> int:
    """Returns how many processes of the run share a GPU at most; 1 unless GPUs are shared."""
    if not gpus_are_shared():
        return 1
    here = env.local_size if env else n_processes
    return -(-here // max(1, len(gpus_here(env, n_processes))))


def too_few_gpus(env: RankEnv | None, n_local: int) -> list[str]:
    """Returns why `n_local` processes on this machine cannot each have a GPU; empty if they can."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return [
            "train.device=cuda, but torch finds no GPU on this machine: use train.device=auto or "
            "cpu; `gridformer doctor` shows what torch finds"
        ]
    n_gpus = torch.cuda.device_count()
    if env and not env.knows_local and n_gpus > 1:
        return [
            f"this machine has {n_gpus} GPUs, and {env.by} did not say which one is this "
            "process's: set LOCAL_RANK and LOCAL_WORLD_SIZE, let CUDA_VISIBLE_DEVICES name one GPU "
            "for each process, or start the processes with torchrun or srun"
        ]
    if n_local > n_gpus and gpus_are_shared():
        if problem := _cannot_share():
            return [problem]
    elif n_local > n_gpus and not (n_gpus == 1 and _may_be_bound(env)):
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
    """Returns a text that names this process's machine and GPU, for `device_or_problem`."""
    if gpu is None:
        return json.dumps([socket.gethostname(), ""])
    import torch

    try:
        name = str(torch.cuda.get_device_properties(gpu).uuid)
    except (AssertionError, AttributeError, RuntimeError):  # a device without such a number
        name = f"of rank {rank}"
    return json.dumps([socket.gethostname(), name])


def device_or_problem(identities: Sequence[str]) -> str:
    """Returns whether a run uses CPUs or GPUs, or a sentence that says why it cannot start."""
    places = [tuple(json.loads(text)) for text in identities]
    without = [rank for rank, (_, gpu) in enumerate(places) if not gpu]
    if len(without) == len(places):
        return CPU
    if without:
        rank = next(rank for rank, (_, gpu) in enumerate(places) if gpu)
        return (
            f"rank {without[0]} on {places[without[0]][0]} has no GPU of its own, but rank {rank} "
            f"on {places[rank][0]} has one ({len(without)} of {len(places)} ranks have none): "
            "start at most as many processes on a machine as it has GPUs, or use train.device=cpu"
        )
    (gpu, times), *_ = Counter(places).most_common(1)
    if times > 1 and not gpus_are_shared():
        ranks = [str(rank) for rank, here in enumerate(places) if here == gpu]
        return (
            f"ranks {', '.join(ranks[:-1])} and {ranks[-1]} on {gpu[0]} all see the same single "
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


def _n_visible(env: RankEnv | None, n_processes: int = 1) -> int:
    """Returns the number of GPUs that a run of several processes, or of one, can use."""
    visible = n_visible_gpus()
    if not visible or (env.size if env else n_processes) == 1:
        return visible
    import torch.distributed as dist

    return visible if dist.is_nccl_available() else 0


def _cannot_share() -> str | None:
    """Returns why this NCCL cannot let processes share a GPU; None if it can."""
    loaded = nccl_version()
    if loaded is None or loaded[:2] >= _SHARING_SINCE:
        return None
    return (
        f"{SHARING} is set, so that processes share GPUs, but NCCL {'.'.join(map(str, loaded))} "
        "cannot do that: install NCCL 2.30 or newer, or use a layout of at most one process for "
        "each GPU"
    )


def nccl_version() -> tuple[int, int, int] | None:
    """Returns the version of the NCCL library that is loaded, or None if it cannot be asked.

    It may be another than torch was built with, such as by LD_PRELOAD.
    """
    import torch  # loads NCCL

    assert torch
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # a part of torch itself, or another library
        return None
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def _may_be_bound(env: RankEnv | None) -> bool:
    """Whether processes may see different GPUs; those that gridformer starts see the same."""
    return env is not None and env.by != "gridformer.launch"
