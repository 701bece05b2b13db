"""The same blocks in torch's own parallelism: DTensor tensor parallelism, and FSDP2 over it.

The block is the plain one that a user of torch would write from nn.Linear and nn.LayerNorm,
parallelized with torch's own styles as torchtitan does it. Between the products it works on local
tensors, so that DTensor does only what the products and their collectives need.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.schemes import traffic
from benchmarks.schemes.cases import Case, Size
from benchmarks.schemes.variants import Built, Problem, Stack, Variant, Whole, indivisible, leaf

Form = Literal["plain", "tp", "tp-sp", "fsdp-tp", "fsdp-tp-kept"]


class Attention(nn.Module):
    """Causal self-attention; qkv.weight's rows are ordered [n, 3, d] to shard whole heads."""

    def __init__(self, h: int, n: int) -> None:
        super().__init__()
        self.head_dim = h // n
        self.qkv = nn.Linear(h, 3 * h)
        self.out = nn.Linear(h, h)

    def forward(self, x_BSH: Tensor) -> Tensor:
        # A sharded qkv returns only its local heads, so -1 stands for n/c heads.
        qkv: Tensor = self.qkv(x_BSH)
        b, s, _ = qkv.shape
        q, k, v = qkv.view(b, s, -1, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        o_BNSD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(o_BNSD.transpose(1, 2).reshape(b, s, -1))
        return y


class FeedForward(nn.Module):
    def __init__(self, h: int, f: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(h, f), nn.Linear(f, h)

    def forward(self, x_BSH: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x_BSH), approximate="tanh"))
        return y


class TorchBlock(nn.Module):
    """gridformer's Block in torch's modules with the same names. Weights are [out, in]."""

    def __init__(self, h: int, n: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(h, eps), nn.LayerNorm(h, eps)
        self.attention = Attention(h, n)
        self.mlp = FeedForward(h, 4 * h)

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = x_BSH + self.attention(self.norm1(x_BSH))
        return x_BSH + self.mlp(self.norm2(x_BSH))


def plan_tp() -> dict[str, ParallelStyle]:
    """Plan with replicated activations between sections: two all-reduces each way."""
    return {
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }


def plan_sequence() -> dict[str, ParallelStyle]:
    """Plan with activations sharded over s between sections: all-gather in, reduce-scatter out."""

    def whole_input() -> ParallelStyle:
        return PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=False
        )

    return {
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        "attention": whole_input(),
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "mlp": whole_input(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }


@cache
def _mesh(rows: int, cols: int) -> DeviceMesh:
    return init_device_mesh("cpu", (rows, cols), mesh_dim_names=("row", "col"))


@dataclass(frozen=True)
class TorchVariant(Variant):
    name: str
    title: str
    form: Form
    rows: int = 1
    cols: int = 1
    alone: bool = False

    def obstacles(self, size: Size) -> list[str]:
        return indivisible(size, self.rows, self.cols, cuts_sequence=self.form == "tp-sp")

    def volume(self, size: Size, recompute: bool) -> traffic.Volume:
        if self.form in ("fsdp-tp", "fsdp-tp-kept"):
            reshard = self.form == "fsdp-tp"
            return traffic.sharded(size, self.rows, self.cols, recompute, reshard)
        return traffic.one_dimensional(size, self.cols, recompute)

    def build(self, case: Case, problem: Problem) -> Built:
        mesh = None if self.form == "plain" else _mesh(self.rows, self.cols)
        blocks = [self._block(layer, case.size, problem, mesh) for layer in range(case.size.layers)]
        stack = Stack(blocks, case.recompute)
        if mesh is not None and self.form in ("fsdp-tp", "fsdp-tp-kept"):
            self._shard(stack, mesh)
        parameters = {
            f"{layer}.{name}": parameter
            for layer, block in enumerate(blocks)
            for name, parameter in block.named_parameters()
        }

        def cut(x_BSH: Tensor) -> Tensor:
            if mesh is None:
                return x_BSH
            if self.form == "tp-sp":
                return x_BSH.chunk(self.cols, 1)[mesh.get_local_rank("col")]
            return x_BSH.chunk(self.rows)[mesh.get_local_rank("row")]

        return Built(
            stack=stack,
            x=leaf(cut(problem.x)),
            g=cut(problem.g).contiguous(),
            cut=cut,
            finish=_reduce_partial(stack, mesh) if self.form == "tp-sp" else lambda: None,
            compared=lambda whole: _compared(parameters, whole),
            count=traffic.torch_traffic,
        )

    def _block(
        self, layer: int, size: Size, problem: Problem, mesh: DeviceMesh | None
    ) -> TorchBlock:
        block = TorchBlock(size.h, size.n)
        with torch.no_grad():
            for name, parameter in block.named_parameters():
                parameter.copy_(_turned(problem.weights[f"{layer}.{name}"]))
        if mesh is not None:
            plan = plan_sequence() if self.form == "tp-sp" else plan_tp()
            parallelize_module(block, mesh["col"], plan)
        return block

    def _shard(self, stack: Stack, mesh: DeviceMesh) -> None:
        reshard = self.form == "fsdp-tp"
        for block in [*stack.blocks, stack]:
            fully_shard(block, mesh=mesh["row"], reshard_after_forward=reshard)
        for module in stack.modules():
            if isinstance(module, FSDPModule):
                # Gradients are summed, as in every variant here. gloo has no other reduction.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)


def _turned(x: Tensor) -> Tensor:
    """Transpose nn.Linear's weight [out, in] to gridformer's [in, out], or back."""
    return x.t() if x.dim() == 2 else x


def _compared(
    parameters: dict[str, nn.Parameter], whole: Whole
) -> Iterator[tuple[str, Tensor, Tensor]]:
    # torch warns that gathering over both axes takes two messages, which does not matter here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for name, parameter in parameters.items():
        grad = parameter.grad
        assert grad is not None, name
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        yield name, grad, _turned(whole[name])


def _reduce_partial(stack: Stack, mesh: DeviceMesh | None) -> Callable[[], None]:
    """Sum gradients that DTensor leaves as partial sums, in one message per step.

    With tokens sharded over the columns, each rank's gradient of a norm is a partial sum. DTensor
    would reduce them one by one when an optimizer reads them.
    """
    assert mesh is not None
    group = mesh.get_group("col")

    def reduce() -> None:
        partial = [
            (p, p.grad)
            for p in stack.parameters()
            if isinstance(p.grad, DTensor) and isinstance(p.grad.placements[0], Partial)
        ]
        flat = torch.cat([grad.to_local().flatten() for _, grad in partial])
        dist.all_reduce(flat, group=group)
        parts = flat.split([grad.numel() for _, grad in partial])
        for (parameter, grad), part in zip(partial, parts):
            local = part.view(grad.shape)
            parameter.grad = DTensor.from_local(
                local, grad.device_mesh, [Replicate()], run_check=False
            )

    return reduce


def torch_variants(processes: int) -> list[Variant]:
    if processes == 1:
        return [TorchVariant("torch", "one process, torch's modules", "plain", alone=True)]
    side = math.isqrt(processes)
    line, grid = f"1x{processes}", f"{side}x{side}"
    return [
        TorchVariant("torch-tp", f"torch DTensor {line}", "tp", cols=processes),
        TorchVariant(
            "torch-tp-sp", f"torch DTensor {line}, sequence parallel", "tp-sp", cols=processes
        ),
        TorchVariant("fsdp-tp", f"torch FSDP2 x DTensor {grid}", "fsdp-tp", side, side),
        TorchVariant(
            "fsdp-tp-kept",
            f"torch FSDP2 x DTensor {grid}, weights kept",
            "fsdp-tp-kept",
            side,
            side,
        ),
    ]
