"""Runs a whole optimizer step of one rank on tensors that claim to be on a GPU, on any machine.

Fake tensors have a device but no memory, and like a GPU's they refuse to be mixed with tensors of
another device. A CPU build of torch cannot run backward through fake tensors on `cuda`, so they use
torch's PrivateUse1 device type, which behaves alike: gradients are computed in a separate thread
unless torch is told otherwise, and messages take the paths of `gridformer.comm` that NCCL uses.

A registered device type stays registered, so all this runs in its own process.
"""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gridformer
from gridformer.comm import record_messages
from gridformer.comm.recorder import Recorder
from gridformer.config import RunConfig
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.axes import build_axes
from gridformer.record.batch import rows_like
from gridformer.record.device import NAME, fake_gpu
from gridformer.train.step import Stepper
from gridformer.utils import rng

SOURCE = str(Path(gridformer.__file__).parent)
PRODUCTS = {getattr(torch.ops.aten, name) for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm")}


InProcess = Callable[..., Any]  # calls a function in the process with a fake GPU


@contextmanager
def own_process(imports_nothing: bool = False) -> Iterator[InProcess]:
    """Yield a caller of top-level functions in a process that has a fake GPU.

    An exception there comes back as a RuntimeError with its traceback.

    Args:
        imports_nothing: Whether the process starts without any module. Others take over what the
            fork server has imported for earlier tests.
    """
    context = get_context("spawn" if imports_nothing else "forkserver")
    with ProcessPoolExecutor(1, context) as process:
        yield lambda fn, *args: process.submit(_call, fn, args).result()


def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return fn(*args)
    except Exception:  # not all of torch's errors can be pickled
        raise RuntimeError(traceback.format_exc()) from None


@dataclass(frozen=True)
class Step:
    """What a rank sent and what it read back from the device.

    Attributes:
        messages: Messages as (operation, axis, label).
        threads: The threads that sent them.
        reads: One entry for each read-back and each copy to the device for which the host waits; at
            each of them it waits until all kernels are done.
        places: Where in the code each of them is.
        products: The number of matrix products.
    """

    messages: list[tuple[str, str, str]]
    threads: set[int]
    reads: list[int]  # how many matrix products were launched before each of them
    places: list[str]
    products: int

    @staticmethod
    def of(recorder: Recorder, watch: Watch) -> Step:
        found = [(one.op, one.axis, one.label) for one in recorder.records]
        return Step(found, watch.threads, watch.reads, watch.places, watch.products)

    def over(self, *axes: str) -> list[tuple[str, str, str]]:
        return [message for message in self.messages if message[1] in axes]


class Watch(TorchDispatchMode):
    """Refuses to send tensors that are not on the GPU, as NCCL does; records threads and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.reads: list[int] = []
        self.places: list[str] = []
        self.products = 0

    def read(self) -> None:
        """Note that the host waits for the device here."""
        self.reads.append(self.products)
        ours = [frame for frame in traceback.extract_stack() if SOURCE in frame.filename]
        self.places.append(f"{ours[-1].filename}:{ours[-1].lineno}" if ours else "outside")

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
        if _waits(func, args, kwargs or {}):
            self.read()
        return func(*args, **(kwargs or {}))


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation copies between the device and the host and waits for that.

    A copy to the device waits for all kernels that were launched before it, too.
    """
    blocking = not kwargs.get("non_blocking", False)
    if func is torch.ops.aten._to_copy.default:
        to = kwargs.get("device")
        to = args[0].device if to is None else torch.device(to)
        return blocking and {args[0].device.type, to.type} == {NAME, "cpu"}
    if func is torch.ops.aten.copy_.default:
        blocking &= not (len(args) > 2 and args[2])
        return blocking and {args[0].device.type, args[1].device.type} == {NAME, "cpu"}
    return False


@contextmanager
def playing(rank: int, n_processes: int) -> Iterator[None]:
    """Act as one rank of a group of GPUs, which the code believes NCCL serves."""
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
    """Tensors made inside have no memory; a number read back from one is 1.

    Args:
        watch: Records what is read back from the device. torch refuses other ways to read.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    def ones(x: Tensor) -> Any:
        if watch is not None and x.device.type == NAME:
            watch.read()
        return np.ones(tuple(x.shape)).tolist()

    with (
        patch.object(FakeTensor, "tolist", ones),
        patch.object(FakeTensor, "__float__", ones),
        FakeTensorMode(),
    ):
        yield


@contextmanager
def short_masks() -> Iterator[None]:
    """Leave out most of the integer operations that make dropout masks.

    They are the same everywhere, and take most of the time of a fake step with dropout.
    """
    with patch.object(rng, "_mix", lambda x: x), patch.object(rng, "_fold", lambda x: x):
        yield


def step_of(run: RunConfig, rank: int, whole_masks: bool = True) -> Step:
    """Run an optimizer step and an evaluation of one rank of a checked run, in `own_process`.

    It also raises errors about mixed devices of which torch only warns.

    Args:
        whole_masks: Whether dropout masks are made as in a real step; see `short_masks`.
    """
    warnings.filterwarnings("error", message=".*at least two types of devices")
    device, (layout, train) = fake_gpu(), (run.layout, run.train)
    choices, watch = decide_run(run).choices, Watch()
    masks = nullcontext() if whole_masks else short_masks()
    with masks, playing(rank, layout.n_processes):
        axes = build_axes(layout, NAME)
        with fake_tensors(watch), watch, record_messages() as recorder:
            model = build_parallel(
                run.model, layout, axes, train.seed, device, train.dtype, choices, filled=False
            )
            stepper = Stepper(model, train, axes, layout)
            stepper.executor.has_loaded()  # the first steps of a pipeline send through the host
            stepper(0, partial(rows_like, run))
            reads, places, products = [*watch.reads], [*watch.places], watch.products
            stepper.evaluate([partial(rows_like, run)])
    found = Step.of(recorder, watch)
    return replace(found, reads=reads, places=places, products=products)
