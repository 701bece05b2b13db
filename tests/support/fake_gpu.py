"""A whole optimizer step of one rank on tensors that claim to lie on a GPU, on any machine.

Fake tensors have a device and no memory, and refuse to be mixed with those of another device, as a
GPU's do. A build of torch for CPUs cannot go back through fake tensors of `cuda`. So their device
is of torch's PrivateUse1 type, which behaves alike: gradients are computed in a thread of its own
unless torch is told otherwise, and messages take the ways of `gridformer.comm` that are NCCL's.

A device that is registered once stays, so all this runs in a process of its own.
"""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gridformer.comm import record
from gridformer.comm.recorder import Recorder
from gridformer.config import RunConfig
from gridformer.memory.estimate import rows_like
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.axes import build_axes
from gridformer.train.step import Stepper

NAME = "fakegpu"
PRODUCTS = {getattr(torch.ops.aten, name) for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm")}


class _Backend:
    """What torch asks of a kind of devices."""

    @staticmethod
    def is_available() -> bool:
        """Not but for fake tensors, so that torch makes no others there."""
        return False

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


@cache
def fake_gpu() -> torch.device:
    """Of this process, which is told of it once."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, _Backend)
    return torch.device(NAME, 0)


@contextmanager
def own_process() -> Iterator[Callable[..., Any]]:
    """Calls functions, of modules' top level, in a process that has a fake GPU. What they raise
    comes back as a RuntimeError with the traceback."""
    with ProcessPoolExecutor(1, get_context("forkserver")) as process:
        yield lambda fn, *args: process.submit(_call, fn, args).result()


def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return fn(*args)
    except Exception:  # of torch's errors not all can be pickled
        raise RuntimeError(traceback.format_exc()) from None


@dataclass(frozen=True)
class Step:
    """What a rank sent, as (operation, axis, label), the threads that did, and what it read back
    from the device, each time of which the host waits until all kernels are done."""

    messages: list[tuple[str, str, str]]
    threads: set[int]
    reads: list[int]  # how many matrix products were launched before each read-back
    products: int

    @staticmethod
    def of(recorder: Recorder, watch: Watch) -> Step:
        found = [(one.op, one.axis, one.label) for one in recorder.records]
        return Step(found, watch.threads, watch.reads, watch.products)

    def over(self, *axes: str) -> list[tuple[str, str, str]]:
        return [message for message in self.messages if message[1] in axes]


class Watch(TorchDispatchMode):
    """Refuses to send what is not on the GPU, as NCCL does, and remembers who sends."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.reads: list[int] = []
        self.products = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            wrong = {x.device.type for x in tensors} - {NAME}
            if wrong:
                raise RuntimeError(f"{func}: a tensor on {wrong.pop()} is handed to NCCL")
            self.threads.add(threading.get_ident())
        self.products += func.overloadpacket in PRODUCTS
        return func(*args, **(kwargs or {}))


@contextmanager
def playing(rank: int, n_processes: int) -> Iterator[None]:
    """Be one rank of a group of GPUs, of which the code believes that NCCL serves it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if n_processes == 1:
        yield
        return
    backend = f"{fake_gpu().type}:fake"
    dist.init_process_group(backend, rank=rank, world_size=n_processes, store=FakeStore())
    try:
        with patch.object(dist, "get_backend", lambda *_: "nccl"):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors(watch: Watch | None = None) -> Iterator[None]:
    """Tensors made inside have no memory. Where a number is read back from one it is 1.

    Args:
        watch: remembers what is read back from the device. Other ways to read are refused by torch.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    def ones(x: Tensor) -> Any:
        if watch is not None and x.device.type == NAME:
            watch.reads.append(watch.products)
        return np.ones(tuple(x.shape)).tolist()

    with (
        patch.object(FakeTensor, "tolist", ones),
        patch.object(FakeTensor, "__float__", ones),
        FakeTensorMode(),
    ):
        yield


def step_of(run: RunConfig, rank: int) -> Step:
    """An optimizer step and an evaluation of one rank of a checked run. Call it in `own_process`.

    Raises what a mix of devices raises, where torch only warns of it, too.
    """
    warnings.filterwarnings("error", message=".*at least two types of devices")
    device, (layout, train) = fake_gpu(), (run.layout, run.train)
    choices, watch = decide_run(run).choices, Watch()
    with playing(rank, layout.n_processes):
        axes = build_axes(layout, NAME)
        with fake_tensors(watch), watch, record() as recorder:
            model = build_parallel(
                run.model, layout, axes, train.seed, device, train.dtype, choices, filled=False
            )
            stepper = Stepper(model, train, axes, layout)
            stepper(0, partial(rows_like, run))
            reads, products = [*watch.reads], watch.products
            stepper.evaluate([partial(rows_like, run)])
    return replace(Step.of(recorder, watch), reads=reads, products=products)
