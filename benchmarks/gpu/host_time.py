"""How long the host takes to launch one layer, forward and backward, beside torch and Hugging Face.

    python -m benchmarks.gpu host-time

On GPUs a step of small layers is limited by Python, which launches kernels and messages. Here this
is measured without a GPU: tensors are so small that their arithmetic takes almost no time, one
thread computes, and messages go through torch's fake backend, which sends nothing and returns at
once. gridformer takes the path that it takes over NCCL. Each side runs as one rank of four.

The time of a layer is the difference between two models, divided by the difference between their
numbers of layers, so that embedding, head and loss do not count. Sides alternate in one process, in
rounds of shuffled order. What is compared is forward and backward with all sums of gradients, not
the update. Of sides that run on one device, the operators that launch a kernel are counted, too.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # keeps transformers from downloading anything

import gc
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.report import Report, median, table
from benchmarks.gpu.sides import causal_model
from benchmarks.schemes.cases import Case, Size
from benchmarks.schemes.torch_variants import TorchVariant
from benchmarks.schemes.variants import make_problem
from gridformer.config import LayoutConfig, ModelConfig, TrainConfig
from gridformer.config.model import sizes_of_folder
from gridformer.mesh import Axes, groups
from gridformer.models import count_parameters
from gridformer.parallel import build_parallel
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data.gradients import clear_gradients, reduce_gradients
from gridformer.record.kernels import launched_work
from gridformer.train.step import Stepper
from gridformer.utils.batch import MicroBatch, next_words

RANKS = 4
FEW, MANY = 2, 10  # numbers of layers
VOCABULARY = 64
Run = Callable[[], None]  # one forward and backward pass


@dataclass(frozen=True)
class Side:
    """One implementation.

    Attributes:
        name: Its name in the table.
        build: Returns a pass over a model with this number of layers.
        rival: The name of the side with which the table compares it; empty if it is a rival itself.
        counts: Whether the kernels of a layer are counted.
    """

    name: str
    build: Callable[[int], Run]
    rival: str = ""
    counts: bool = False


def size_of(n_layers: int) -> Size:
    return Size(b=4, s=16, h=64, n=4, layers=n_layers)


# --------------------------------------------------------------------------- gridformer


def gpt2_of(size: Size) -> ModelConfig:
    return size.model().model_copy(update={"vocab_size": VOCABULARY})


def llama_of(size: Size) -> ModelConfig:
    return ModelConfig(
        family="llama",
        n_layers=size.layers,
        hidden_size=size.h,
        n_heads=size.n,
        n_kv_heads=size.n,
        ffn_size=11 * size.h // 4,
        vocab_size=VOCABULARY,
        max_seq_len=size.s,
        tied_head=False,
    )


@lru_cache
def network_of(size: Size) -> ModelConfig:
    """Return the same Llama as a network of transformers, which gridformer parallelizes."""
    with tempfile.TemporaryDirectory() as folder:
        causal_model(llama_of(size)).config.save_pretrained(folder)
        config = ModelConfig(**sizes_of_folder(folder))
        count_parameters(config)  # reads the folder while it is there
    return config


def ours(
    layout: dict[str, Any], config_of: Callable[[Size], ModelConfig] = gpt2_of
) -> Callable[[int], Run]:
    """Return a builder of the production passes and reductions on a layout."""

    def build(n_layers: int) -> Run:
        plan, size = LayoutConfig(**layout), size_of(n_layers)
        config = config_of(size)
        axes = Axes() if plan.n_processes == 1 else build_axes(plan, "cpu")
        model = build_parallel(config, plan, axes, 1, torch.device("cpu"))
        stepper = Stepper(model, TrainConfig(global_batch=size.b), axes, plan)
        batch = next_words(torch.randint(VOCABULARY, (size.b, size.s + 1)))
        rows = stepper.split.rows(0)
        work = [MicroBatch(rows, {key: value[rows] for key, value in batch.items()})]
        counts = {name: torch.tensor(size.b * size.s) for name in model.counts(work[0].batch)}
        model.train()

        def run() -> None:
            clear_gradients(stepper.parameters)
            with stepper.kept.open():
                stepper.passes.train(work, counts)
            reduce_gradients(stepper.parameters, axes, stepper.sums)

        return run

    return build


# --------------------------------------------------------------------------- torch, Hugging Face


def hugging_face(config_of: Callable[[Size], ModelConfig]) -> Callable[[int], Run]:
    """Return a builder of passes over transformers' model of the same config."""

    def build(n_layers: int) -> Run:
        size = size_of(n_layers)
        model = causal_model(config_of(size))
        tokens = torch.randint(VOCABULARY, (size.b, size.s))

        def run() -> None:
            model.zero_grad(set_to_none=True)
            model(input_ids=tokens, labels=tokens).loss.backward()

        return run

    return build


def in_torch(variant: TorchVariant) -> Callable[[int], Run]:
    """Return a builder of a variant of `benchmarks.schemes` in torch's own parallelism."""

    def build(n_layers: int) -> Run:
        size = size_of(n_layers)
        built = variant.build(_case(size), make_problem(size))

        def run() -> None:
            built.clear()
            built.backward(built.forward())

        return run

    return build


def in_torch_llama(shards: bool) -> Callable[[int], Run]:
    """Return a builder of transformers' Llama under FSDP2, or else `parallelize_module`."""

    def build(n_layers: int) -> Run:
        size = size_of(n_layers)
        model, mesh = causal_model(llama_of(size)), init_device_mesh("cpu", (RANKS,))
        for layer in model.model.layers:
            if shards:
                fully_shard(layer, mesh=mesh)
                continue
            wide = dict.fromkeys(_OPENING, ColwiseParallel())
            parallelize_module(layer, mesh, wide | dict.fromkeys(_CLOSING, RowwiseParallel()))
            # Their code divides the local width by that of a head, so it needs no other change.
        if shards:
            fully_shard(model, mesh=mesh)
        tokens = torch.randint(VOCABULARY, (size.b // (RANKS if shards else 1), size.s))

        def run() -> None:
            model.zero_grad(set_to_none=True)
            model(input_ids=tokens, labels=tokens).loss.backward()

        return run

    return build


_OPENING = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
_CLOSING = ["self_attn.o_proj", "mlp.down_proj"]


@dataclass(frozen=True)
class _CaseOf(Case):
    """A case of a size that is not in the table of `benchmarks.schemes`."""

    shape: Size

    @property
    def size(self) -> Size:
        return self.shape


def _case(size: Size) -> Case:
    return _CaseOf("host time", RANKS, recompute=False, shape=size)


def fsdp2(n_layers: int) -> Run:
    """Build torch's FSDP2 over all ranks, on the plain blocks of `benchmarks.schemes`."""
    size = size_of(n_layers)
    plain = TorchVariant("torch", "", "plain", alone=True).build(_case(size), make_problem(size))
    mesh = init_device_mesh("cpu", (RANKS,))
    blocks = plain.stack.get_submodule("blocks").children()
    for module in [*blocks, plain.stack]:
        fully_shard(module, mesh=mesh)
    for module in plain.stack.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    x, g = plain.x.detach()[:1].requires_grad_(), plain.g[:1]

    def run() -> None:
        plain.stack.zero_grad(set_to_none=True)
        x.grad = None
        torch.autograd.backward(plain.stack(x), g)

    return run


def sides() -> list[Side]:
    """Return all sides; a rival comes before what is compared with it."""
    grid = {"rows": 2, "cols": 2}
    optimus = {"scheme": "optimus", **grid}
    branches = {"scheme": "subgraph", "branches": RANKS}
    gpt2, llama = "Hugging Face, one device", "Hugging Face's Llama, one device"
    layouts: dict[str, dict[str, Any]] = {
        "megatron 1x4": {"scheme": "megatron", "cols": RANKS},
        "optimus 2x2": optimus,
        "fsdp over 4": {"dp": RANKS, "dp_mode": "fsdp"},
    }
    tp, sp, both = "DTensor 1x4", "DTensor 1x4, sequence parallel", "FSDP2 x DTensor 2x2"
    return [
        Side(gpt2, hugging_face(gpt2_of), counts=True),
        Side("single", ours({}), gpt2, counts=True),
        Side(llama, hugging_face(llama_of), counts=True),
        Side("llama, single", ours({}, llama_of), llama, counts=True),
        Side(tp, in_torch(TorchVariant("torch-tp", "", "tp", cols=RANKS))),
        Side("megatron 1x4", ours({"scheme": "megatron", "cols": RANKS}), tp),
        Side(sp, in_torch(TorchVariant("torch-tp-sp", "", "tp-sp", cols=RANKS))),
        Side(
            "megatron 1x4, sequence parallel",
            ours({"scheme": "megatron", "cols": RANKS, "sequence_parallel": True}),
            sp,
        ),
        Side(both, in_torch(TorchVariant("fsdp-tp", "", "fsdp-tp", 2, 2))),
        Side("megatron 2-D 2x2", ours({"scheme": "megatron_2d", **grid}), both),
        Side("optimus 2x2, gather", ours({**optimus, "schedule": "gather"}), both),
        Side("optimus 2x2, broadcast", ours({**optimus, "schedule": "broadcast"}), both),
        Side("FSDP2 over 4", fsdp2),
        Side("fsdp over 4", ours({"dp": RANKS, "dp_mode": "fsdp"}), "FSDP2 over 4"),
        Side("D&SP over 4", ours(branches), tp),
        Side("D&SP-cSub over 4", ours({**branches, "common": "first"}), tp),
        Side("network, single", ours({}, network_of), "llama, single", counts=True),
        *(side for name, layout in layouts.items() for side in _networks(name, layout)),
        Side(f"{llama[:-12]}, DTensor 1x4", in_torch_llama(False), "network, megatron 1x4"),
        Side(f"{llama[:-12]}, FSDP2 over 4", in_torch_llama(True), "network, fsdp over 4"),
    ]


def _networks(name: str, layout: dict[str, Any]) -> list[Side]:
    """Return our Llama on a layout, and that of transformers beside it."""
    own = Side(f"llama, {name}", ours(layout, llama_of))
    return [own, Side(f"network, {name}", ours(layout, network_of), own.name)]


# --------------------------------------------------------------------------- measuring


@contextmanager
def fake_world() -> Iterator[None]:
    """Makes this process rank 0 of four whose messages are not sent, on the path of NCCL."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        with patch.object(groups, "over_nccl", lambda _: True):
            yield
    finally:
        dist.destroy_process_group()


def measure(
    chosen: Sequence[Side], rounds: int, passes: int, report: Report
) -> dict[str, list[float]]:
    """Return, for each of these sides, the milliseconds of a layer in each round."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {side.name: [] for side in chosen}
    with fake_world():
        runs = {side.name: (side.build(FEW), side.build(MANY)) for side in chosen}
        for few, many in runs.values():  # warm-up
            for _ in range(3):
                few()
                many()
        order, shuffle = [*runs], random.Random(0)
        gc.collect()
        for number in range(rounds):
            shuffle.shuffle(order)
            for name in order:
                of_few, of_many = (_seconds(run, passes) for run in runs[name])
                found[name].append(1e3 * (of_many - of_few) / (MANY - FEW))
            report.progress(f"round {number + 1} of {rounds}")
    torch.set_num_threads(threads)
    return found


def kernels(chosen: Sequence[Side]) -> dict[str, float]:
    """Return the kernels of a layer, forward and backward, of the sides that are counted."""
    found = {}
    for side in chosen:
        if side.counts:
            few, many = (_launches(side.build(n)) for n in (FEW, MANY))
            found[side.name] = (many - few) / (MANY - FEW)
    return found


def _launches(run: Run) -> int:
    run()  # warm-up
    with _Launches() as seen:
        run()
    return seen.n


class _Launches(TorchDispatchMode):
    """Counts operators that launch a kernel, by the rules of `gridformer.record.kernels`."""

    n = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.n += launched_work(func, args, kwargs, out, "cpu") is not None
        return out


def _seconds(run: Run, passes: int) -> float:
    """Return the shortest processor time of a pass; whatever disturbs it makes it longer."""
    best = float("inf")
    for _ in range(passes):
        began = time.process_time()
        run()
        best = min(best, time.process_time() - began)
    return best


def write(
    chosen: Sequence[Side],
    found: dict[str, list[float]],
    launched: dict[str, float],
    report: Report,
) -> None:
    """Write the table: medians over the rounds, and ratios to the rivals in the same rounds."""
    rows = []
    for side in chosen:
        times, ratio = found[side.name], ""
        if side.rival in found:
            each = [mine / theirs for mine, theirs in zip(times, found[side.rival])]
            ratio = f"{median(each):.2f} of {side.rival}"
        count = f"{launched[side.name]:.0f}" if side.name in launched else ""
        rows.append([side.name, f"{median(times):.2f}", ratio, count])
    report.write(table(["side", "ms a layer", "ratio", "kernels a layer"], rows))
