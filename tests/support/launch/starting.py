"""Runs that fail before or soon after they begin, for tests of the fork server and of memory."""

import os
import resource
import signal
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from gridformer.launch import worker_process
from gridformer.mesh.process_group import init_process_groups
from gridformer.utils.files import writing


def killing_the_server(folder: Path, n: int) -> None:
    """Rank 0 kills the process that forks the others."""
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def with_a_full_disk(folder: Path, n: int) -> None:
    """Rank 1 cannot write; the others wait for it."""
    world = init_process_groups("cpu", n, 600.0)
    dist.barrier()
    if world.rank == 1:
        with writing(Path("/dev/full"), 1 << 20):
            Path("/dev/full").write_text("x")
    dist.all_reduce(torch.ones(1))


def with_a_full_folder(folder: Path, n: int) -> None:
    """The same, where rank 1 cannot write its report, either."""
    if os.environ["RANK"] == "1":
        patch.object(worker_process, "write_whole", side_effect=OSError).start()
    with_a_full_disk(folder, n)


def with_too_many_files(folder: Path, n: int) -> None:
    """Rank 1 may not open any more files; the others wait for it."""
    world = init_process_groups("cpu", n, 600.0)
    dist.barrier()
    kept = []
    while world.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        kept.append(os.dup(0))
    dist.all_reduce(torch.ones(1))


def needing_memory(folder: Path, n: int) -> None:
    """Rank 1 takes memory until it gets no more; the others wait for it."""
    world = init_process_groups("cpu", n, 600.0)
    dist.barrier()
    if world.rank == 1:
        if more := int(os.environ.get("MORE_BYTES", "0")):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more,) * 2)
        kept = []
        while True:
            kept.append(torch.ones(16 << 20))
    dist.all_reduce(torch.ones(1))
