"""A run that fails in training, for test_failing.py; see entrypoints.py."""

import os
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from gridformer.config import (
    DataConfig,
    LayoutConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    shipped_model,
)
from gridformer.launch import run as runner
from gridformer.mesh.process_group import World
from gridformer.parallel.auto.decisions import decide_run
from gridformer.train.plan import Plan
from tests.support.launch.entrypoints import note


def one_fails_in_training(folder: Path, n: int) -> None:
    """Fail in a training run. Leaving a group waits for peers in a collective, as NCCL does."""

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

    model = ModelConfig.model_validate(shipped_model("demo-4m"))
    layout = LayoutConfig(scheme="megatron", rows=1, cols=n)
    train = TrainConfig(device="cpu", timeout_s=600.0)
    run = RunConfig(model=model, data=DataConfig(path=folder), layout=layout, train=train)
    with (
        patch.object(runner, "Trainer", Failing),
        patch.object(dist, "destroy_process_group", leave),
    ):
        runner.worker(Plan(run, folder, None, 0, decide_run(run)))
