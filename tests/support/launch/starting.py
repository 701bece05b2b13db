"""Runs that fail before or soon after they begin, for test_fork_server.py and test_explain.py."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from gridformer.mesh.process_group import init_world
from gridformer.utils.disk import writing


def killing_the_server(folder: Path, n: int) -> None:
    """Rank 0 kills the process that forks the others."""
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def with_a_full_disk(folder: Path, n: int) -> None:
    """Rank 1 cannot write; the others wait for it."""
    world = init_world("cpu", n, 600.0)
    dist.barrier()
    if world.rank == 1:
        with writing(Path("/dev/full"), 1 << 20):
            Path("/dev/full").write_text("x")
    dist.all_reduce(torch.ones(1))
