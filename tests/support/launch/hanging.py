"""Runs that hang or fail in training, for test_hang.py and test_failing.py.

Each runs the real worker with a trainer that only sends messages. Rank 1 is the one to blame.
"""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from gridformer import comm, config
from gridformer.comm import progress
from gridformer.launch import run as runner
from gridformer.mesh.axes import Axis
from gridformer.mesh.process_group import World
from gridformer.parallel.auto.decisions import decide_run
from gridformer.train.plan import Plan
from tests.support.launch.entrypoints import note

TIMEOUT_S = 3.0
FAR_S = 600.0  # longer than any test
Fault = Callable[[Axis], None]


class Summing(nn.Module):
    """A model of one module, which sums what it is given over all ranks."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return comm.all_reduce(x, self.axis, label="sum")


def _train(trainer: type, folder: Path, n: int, timeout_s: float = TIMEOUT_S) -> None:
    """Run a worker whose trainer is another one."""
    layout = config.LayoutConfig(scheme="megatron", rows=1, cols=n)
    train = config.TrainConfig(device="cpu", timeout_s=timeout_s)
    model = config.ModelConfig.model_validate(config.shipped_model("demo-4m"))
    run = config.RunConfig(
        model=model, data=config.DataConfig(path=folder), layout=layout, train=train
    )
    with patch.object(runner, "Trainer", trainer):
        runner.worker(Plan(run, folder, None, 0, decide_run(run)))


def _run(folder: Path, n: int, fault: Fault, at: int = 3) -> None:
    """Train until rank 1 meets a fault, in a step counted from 1."""

    class Trainer:
        def __init__(self, plan: Plan, world: World, *others: object) -> None:
            self.axis = Axis("col", n, world.rank)
            self.model = nn.Sequential(Summing(self.axis))
            note(folder, "pid", str(os.getpid()))

        def fit(self) -> None:
            for step in range(1, 1000):
                progress.at_step(step)
                if step == at and self.axis.index == 1:
                    fault(self.axis)
                self.model(torch.ones(8))
            comm.barrier((self.axis,))

    _train(Trainer, folder, n)


def stopped(folder: Path, n: int) -> None:
    """Rank 1 is stopped, as by SIGSTOP or a debugger."""

    def stop(axis: Axis) -> None:
        time.sleep(1.5)  # the watch keeps the stack in the meantime
        os.kill(os.getpid(), signal.SIGSTOP)

    _run(folder, n, stop)


def slow(folder: Path, n: int) -> None:
    """Rank 1 computes for longer than the timeout."""

    def compute(axis: Axis) -> None:
        until = time.monotonic() + FAR_S
        while time.monotonic() < until:
            torch.randn(100, 100) @ torch.randn(100, 100)

    _run(folder, n, compute)


def asleep(folder: Path, n: int) -> None:
    """Rank 1 waits for something that is no message."""
    _run(folder, n, lambda axis: time.sleep(FAR_S))


def other_size(folder: Path, n: int) -> None:
    """Rank 1 sends less than the others."""

    def send(axis: Axis) -> None:
        comm.all_gather(torch.ones(4), axis, 0, label="rows")

    _run(folder, n, send)


def other_order(folder: Path, n: int) -> None:
    """Ranks 0 and 1 wait for each other's message before they send their own."""

    class Trainer:
        def __init__(self, plan: Plan, world: World, *others: object) -> None:
            self.axis, self.model = Axis("pp", n, world.rank), nn.Identity()
            note(folder, "pid", str(os.getpid()))

        def fit(self) -> None:
            progress.at_step(1)
            other = 1 - self.axis.index

            class Axes:
                pp = self.axis

            channel = comm.P2PChannel(Axes, ring=False)  # type: ignore[arg-type]
            channel.receive(torch.empty(4), other, "forward").wait()
            channel.send(torch.ones(4), other, "forward").wait()

    _train(Trainer, folder, n)


def one_fails_in_training(folder: Path, n: int) -> None:
    """Leaving a group waits for peers in a collective, as NCCL does."""

    class Failing:
        def __init__(self, plan: Plan, world: World, *others: object) -> None:
            self.rank, self.model = world.rank, None
            note(folder, "pid", str(os.getpid()))

        def fit(self) -> None:
            dist.barrier()
            if self.rank == 1:
                note(folder, "raised", f"{time.time()}")
                raise ValueError("the root cause")
            if self.rank == 2:  # one stage of a pipeline
                work = dist.irecv(torch.empty(1), group_src=1)
                assert work is not None
                work.wait()
            else:  # in a collective as over NCCL: the host is in C++, and no connection breaks
                store = dist.distributed_c10d._get_default_store()
                store.wait(["never set"], timedelta(seconds=600))

    def leave() -> None:
        note(folder, "left")
        time.sleep(600)

    with patch.object(dist, "destroy_process_group", leave):
        _train(Failing, folder, n, timeout_s=FAR_S)
