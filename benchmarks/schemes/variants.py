"""The schemes that are compared: their names, where they can run and how they are built.

All variants compute the same thing: a stack of N transformer blocks maps x [b, s, h] to y [b, s,
h], and loss = sum(y g), in float32 without dropout. x requires a gradient, as the input of a layer
inside a deep model does. Every variant takes its shards of the given whole weights.
torch_variants.py holds torch's own parallelism.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.schemes import traffic
from benchmarks.schemes.cases import Case, Size
from gridformer.config import LayoutConfig
from gridformer.mesh import Axes
from gridformer.models import GPT2
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.products import Work
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data.gradients import reduce_gradients
from gridformer.parallel.registry import spec_of
from gridformer.parallel.sharding import shard_of
from gridformer.parallel.tensor.summa import gathered_weights_scope

CPU = torch.device("cpu")
Whole = dict[str, Tensor]  # keyed by name, for instance `0.attention.qkv.weight` for layer 0


@dataclass(frozen=True)
class Problem:
    """The whole inputs, equal on every rank: weights, x and g [b, s, h]."""

    weights: Whole
    x: Tensor
    g: Tensor


def make_problem(size: Size, seed: int = 1) -> Problem:
    """Draw random weights in gridformer's layout, [in, out].

    Biases and norms are random too, so that they affect the result.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        block = GPT2(size.model()).layers["0"]
    weights: Whole = {}
    for layer in range(size.layers):
        for name, parameter in block.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if noise.dim() == 2:
                noise *= noise.shape[0] ** -0.5
            else:
                noise = (1.0 if name.endswith("weight") else 0.0) + 0.1 * noise
            weights[f"{layer}.{name}"] = noise
    shape = (size.b, size.s, size.h)
    x, g = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    return Problem(weights, x, g)


class Stack(nn.Module):
    """Blocks one after the other; with `recompute`, each keeps only its input for backward."""

    def __init__(self, blocks: Iterable[nn.Module], recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Recomputed(b) if recompute else b for b in blocks)

    def forward(self, x_BSH: Tensor) -> Tensor:
        for block in self.blocks:
            x_BSH = block(x_BSH)
        return x_BSH


class Recomputed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x_BSH: Tensor) -> Tensor:
        # Nothing here is random, so no random state has to be saved and restored.
        y: Tensor = checkpoint(self.block, x_BSH, use_reentrant=False, preserve_rng_state=False)
        return y


@dataclass
class Built:
    """A variant on this rank, ready to run.

    Attributes:
        x: This rank's block of the input.
        g: This rank's block of the output's gradient.
        cut: Takes this rank's block of a whole tensor [b, s, h].
        finish: Completes the gradients after backward; it is timed with backward.
        step: Entered before forward and left after backward; weights do not change inside.
        compared: Given the whole gradients, yields (name, this rank's, expected).
        count: Counts the collectives inside a `with` block.
    """

    stack: nn.Module
    x: Tensor
    g: Tensor
    cut: Callable[[Tensor], Tensor]
    finish: Callable[[], None]
    compared: Callable[[Whole], Iterator[tuple[str, Tensor, Tensor]]]
    count: Callable[[], AbstractContextManager[traffic.Traffic]]
    step: Callable[[], AbstractContextManager[None]] = nullcontext
    _inside: ExitStack = field(default_factory=ExitStack)

    def forward(self) -> Tensor:
        self._inside.enter_context(self.step())
        y: Tensor = self.stack(self.x)
        return y

    def backward(self, y: Tensor) -> None:
        """Run the backward pass of loss = sum(y g), whose gradient with respect to y is g."""
        torch.autograd.backward(y, self.g)
        self._inside.close()
        self.finish()

    def clear(self) -> None:
        """Drop all gradients."""
        self.stack.zero_grad(set_to_none=True)
        self.x.grad = None


class Variant(ABC):
    """One row of the tables.

    Attributes:
        name: What --only takes.
        title: The name in the tables, with the grid.
        alone: Whether it runs on rank 0 while the other processes wait.
        one_thread: Whether it leaves the waiting processes' threads unused.
    """

    name: str
    title: str
    alone: bool = False
    one_thread: bool = False

    @abstractmethod
    def obstacles(self, size: Size) -> list[str]:
        """Return why it cannot run at this size; empty if it can."""

    @abstractmethod
    def volume(self, size: Size, recompute: bool) -> traffic.Volume:
        """Return the elements that a rank should move per layer."""

    @abstractmethod
    def build(self, case: Case, problem: Problem) -> Built:
        """Build this rank's part. All ranks call it, unless the variant runs alone."""

    def threads(self, processes: int, cores: int) -> int:
        """Return the threads: as many cores as the group's processes can use."""
        if self.one_thread:
            return 1
        if self.alone:
            return cores if processes == 1 else min(cores, processes)
        return max(1, cores // processes)


def indivisible(
    size: Size, rows: int, cols: int, cuts_hidden: bool = False, cuts_sequence: bool = False
) -> list[str]:
    """Return what does not divide over a grid that shards b over rows and heads over columns."""
    wanted = {"b": (size.b, rows), "n": (size.n, cols)}
    if cuts_hidden:
        wanted["h"] = size.h, math.lcm(rows, cols)
    if cuts_sequence:
        wanted["s"] = size.s, cols
    return [f"{name}={v} does not divide by {by}" for name, (v, by) in wanted.items() if v % by]


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()


# --------------------------------------------------------------------------- gridformer


@cache
def _axes(rows: int, cols: int) -> Axes:
    """Build one set of process groups for all variants of a grid."""
    return build_axes(LayoutConfig(scheme="optimus", rows=rows, cols=cols), "cpu")


@dataclass(frozen=True)
class GridformerVariant(Variant):
    name: str
    title: str
    layout: LayoutConfig
    alone: bool = False
    one_thread: bool = False
    # chunks of a gather, set here because `auto` does not chunk such small activations
    parts: int = 1

    def obstacles(self, size: Size) -> list[str]:
        layout, spec = self.layout, spec_of(self.layout)
        return indivisible(
            size,
            layout.rows,
            layout.cols,
            cuts_hidden="rows" in spec.axes,
            cuts_sequence=spec.boundary(layout).activation_layout == "s",
        )

    def volume(self, size: Size, recompute: bool) -> traffic.Volume:
        rows, cols = self.layout.rows, self.layout.cols
        if "rows" in spec_of(self.layout).axes:
            output_stationary = self.layout.stationary == "output"
            return traffic.two_dimensional(size, rows, cols, recompute, output_stationary)
        return traffic.one_dimensional(size, cols, recompute)

    def build(self, case: Case, problem: Problem) -> Built:
        layout, size = self.layout, case.size
        axes = _axes(layout.rows, layout.cols)
        choices = decide(size.model(), layout, Work(tokens=size.b * size.s))
        if self.parts > 1:
            products = choices.products.items()
            chunked_loss = {name: replace(choice, n_chunks=self.parts) for name, choice in products}
            choices = replace(choices, products=chunked_loss)
        model = build_parallel(size.model(), layout, axes, 0, CPU, "float32", choices)
        blocks = dict(model.get_submodule("layers").named_children())
        parameters = {
            f"{layer}.{name}": parameter
            for layer, block in blocks.items()
            for name, parameter in block.named_parameters()
        }
        with torch.no_grad():
            for name, parameter in parameters.items():
                block = shard_of(parameter).block_of(problem.weights[name], parameter.shape)
                parameter.copy_(block)
        stack = Stack(blocks.values(), case.recompute)

        def compared(whole: Whole) -> Iterator[tuple[str, Tensor, Tensor]]:
            for name, parameter in parameters.items():
                shard, grad = shard_of(parameter), parameter.grad
                if shard.owned:
                    assert grad is not None, name
                    yield name, grad, shard.block_of(whole[name], grad.shape)

        def cut(x_BSH: Tensor) -> Tensor:
            x_BSH = x_BSH.chunk(axes.row.size)[axes.row.index]
            dim = {"s": 1, "h": 2}.get(spec_of(layout).boundary(layout).activation_layout)
            return x_BSH if dim is None else x_BSH.chunk(axes.col.size, dim)[axes.col.index]

        return Built(
            stack=stack,
            x=leaf(cut(problem.x)),
            g=cut(problem.g).contiguous(),
            cut=cut,
            finish=lambda: reduce_gradients(stack.parameters(), axes),
            compared=compared,
            count=traffic.gridformer_traffic,
            step=lambda: gathered_weights_scope(stack),
        )


def gridformer_variants(processes: int) -> list[Variant]:
    """Return the variants, the reference first.

    Grids are square; 1-D schemes use all processes as columns.
    """
    single = LayoutConfig()
    if processes == 1:
        return [
            GridformerVariant("single", "one process", single, alone=True),
            GridformerVariant("single-1-thread", "one process, 1 thread", single, True, True),
        ]
    side = math.isqrt(processes)
    line, grid = f"1x{processes}", f"{side}x{side}"
    optimus = LayoutConfig(scheme="optimus", rows=side, cols=side)

    def two_d(name: str, title: str, **fields: str) -> GridformerVariant:
        layout = LayoutConfig.model_validate({**optimus.model_dump(), **fields})
        return GridformerVariant(f"optimus-{name}", f"optimus {grid}, {title}", layout)

    none, everything = {"keep_gathered": "none"}, {"keep_gathered": "all"}
    return [
        GridformerVariant("single", "one process", single, alone=True),
        GridformerVariant(
            "megatron", f"megatron {line}", LayoutConfig(scheme="megatron", cols=processes)
        ),
        GridformerVariant(
            "megatron-sp",
            f"megatron {line}, sequence parallel",
            LayoutConfig(scheme="megatron", cols=processes, sequence_parallel=True),
        ),
        GridformerVariant(
            "megatron-2d",
            f"megatron 2-D {grid}",
            LayoutConfig(scheme="megatron_2d", rows=side, cols=side),
        ),
        # The paper's algorithm and its overlapped form keep the output of each product in place.
        two_d("broadcast", "broadcast", schedule="broadcast", stationary="output", **none),
        two_d("pipelined", "pipelined", schedule="pipelined", stationary="output", **none),
        two_d("gather", "gather", schedule="gather", **none),
        replace(two_d("gather-parts", "gather, in 4 parts", schedule="gather", **none), parts=4),
        two_d("gather-kept", "gather, inputs kept", schedule="gather", keep_gathered="inputs"),
        two_d("gather-all", "gather, inputs and weights kept", schedule="gather", **everything),
        two_d("auto", "auto"),
    ]
