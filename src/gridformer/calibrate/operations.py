"""What `gridformer calibrate` measures: products, fused attention, memory-bound kernels, messages.

Shapes are those of transformers. An operation is built on the device that is measured. Its operands
are random numbers, because processors run faster, and GPUs with less power, on zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.cluster.tables import AttentionRow, MemoryRow, ProductRow
from gridformer.train.attention import MEASURED, Shape, attending, times_of

KIB, MIB = 2**10, 2**20
_WIDTH = 1024  # elements in a row of what is normalized
_DRAWN = 1 << 16  # random numbers in a tensor on a CPU, which are repeated in larger ones
_FLOAT32 = ("_fused_adamw_", "exp")  # they work on float32 whatever the type of the computation

Run = Callable[[], object]
New = Callable[[], Tensor]
LinearShape = tuple[int, int, int]  # a layer of (tokens, inner, outer): inner to outer features
BatchedShape = tuple[int, int, int, int]  # (batch, m, n, k): [batch, m, k] x [batch, k, n]
AttentionShape = tuple[int, int, int, int, int, bool]  # batch, heads, queries, keys, width, causal
aten = torch.ops.aten


@dataclass(frozen=True)
class Cases:
    """Everything that is measured on one machine.

    Attributes:
        dtypes: Data types of products and attention, the most important one first. `tf32` are
            float32 tensors multiplied as TF32.
        linears: Linear layers for the first data type. Each makes three products: forward, and two
            in its backward pass, each with operands in another order.
        few_linears: The same for the other data types, and where many processes share the cores.
        batched: Batched products.
        attention: Fused attention.
        bytes: Bytes that memory-bound kernels read and write.
        messages: Bytes of messages.
        window_s: Seconds for which one operation is repeated.
    """

    dtypes: tuple[str, ...]
    linears: tuple[LinearShape, ...]
    few_linears: tuple[LinearShape, ...]
    batched: tuple[BatchedShape, ...]
    attention: tuple[AttentionShape, ...]
    bytes: tuple[int, ...]
    messages: tuple[int, ...]
    window_s: float


def gpu_cases() -> Cases:
    """Returns the cases of a GPU: less than a minute on an H100, by estimate."""
    widths = (768, 1024, 1280, 1920, 2304, 4096)
    layers = [(t, h, n * h) for t, h, n in product((1024, 4096, 16384), widths, (1, 4))]
    skinny = [(t, h, 3 * h // 8) for t, h in product((2048, 8192), (1024, 4096, 12288))]
    small = [(t, i, o) for t, (i, o) in product((128, 512), ((512, 512), (1024, 4096)))]
    heads = [(t, h, 50304) for t, h in ((1024, 768), (4096, 1280), (4096, 2304))]
    odd = [(4096, 768, 50257), (4096, 4096, 4096), (8192, 8192, 8192)]
    attention = (
        *((8, 12, 1024, 64), (8, 20, 1024, 64), (4, 16, 1024, 96), (4, 16, 1024, 128)),
        *((2, 16, 2048, 128), (1, 16, 4096, 128), (1, 8, 8192, 128), (2, 12, 1024, 64)),
        (1, 4, 512, 64),
    )
    return Cases(
        dtypes=("bfloat16", "float16", "tf32", "float32"),
        linears=tuple(dict.fromkeys([*layers, *skinny, *small, *heads, *odd])),
        few_linears=tuple(
            (t, h, o) for t, (h, o) in product((1024, 4096), ((1024, 1024), (2048, 8192)))
        ),
        batched=(
            *((96, 1024, 1024, 64), (96, 1024, 64, 1024)),
            *((128, 512, 512, 64), (128, 512, 64, 512)),
        ),
        attention=(
            *((b, n, s, s, d, causal) for b, n, s, d in attention for causal in (True, False)),
            *((b, n, 512, 512, 64, False) for b, n in ((8, 16), (32, 16), (64, 12))),
        ),
        bytes=(64 * KIB, MIB, 8 * MIB, 64 * MIB, 512 * MIB, 2048 * MIB),
        messages=(4, 4 * KIB, 64 * KIB, MIB, 8 * MIB, 64 * MIB, 256 * MIB),
        window_s=0.03,
    )


def cpu_cases() -> Cases:
    """Returns the cases of a CPU that several processes share."""
    widths = ((64, 64), (128, 512), (512, 128), (512, 512), (512, 2048), (2048, 512))
    linears = [(t, inner, outer) for t, (inner, outer) in product((64, 256, 1024), widths)]
    return Cases(
        dtypes=("float32",),
        linears=(*linears, (2048, 1024, 1024), (1024, 1024, 4096)),
        few_linears=(
            *((64, 64, 64), (256, 128, 512), (256, 512, 128), (256, 512, 512)),
            *((1024, 512, 128), (1024, 128, 512), (1024, 512, 512)),
        ),
        batched=((16, 128, 128, 64), (16, 128, 64, 128)),
        attention=(
            (2, 2, 128, 128, 64, True),
            (8, 2, 128, 128, 64, True),
            (8, 8, 128, 128, 64, True),
            (4, 4, 512, 512, 64, True),
            (4, 4, 128, 128, 64, False),
        ),
        bytes=(16 * KIB, 256 * KIB, 2 * MIB, 16 * MIB),
        messages=(64, 16 * KIB, 256 * KIB, 2 * MIB, 8 * MIB),
        window_s=0.06,
    )


def quick_cases(cases: Cases) -> Cases:
    """Returns a few tiny cases, with which tests try the code."""
    return replace(
        cases,
        dtypes=cases.dtypes[:1],
        linears=((32, 16, 64), (64, 32, 32)),
        few_linears=((32, 16, 64),),
        batched=((2, 16, 16, 8),),
        attention=((2, 2, 16, 16, 8, True),),
        bytes=(4 * KIB, 64 * KIB),
        messages=(64, 4 * KIB),
        window_s=0.002,
    )


# --------------------------------------------------------------------------- operations


@dataclass(frozen=True)
class Operation:
    """One thing to measure.

    Attributes:
        row: Its row in the cluster file, for one process, whose time is not known yet.
        n_bytes: About the memory that it needs.
        flop: Floating-point operations; 0 for memory-bound kernels.
        build: Creates the operands on a device, and returns what is timed.
        within: Returns the context in which it is built and timed.
    """

    row: ProductRow | AttentionRow | MemoryRow
    n_bytes: float
    flop: float
    build: Callable[[torch.device], Run]
    within: Callable[[torch.device], AbstractContextManager[object]] = nullcontext

    @property
    def table(self) -> str:
        """The table of the cluster file in which the row belongs."""
        kinds = {ProductRow: "products", AttentionRow: "attention", MemoryRow: "memory"}
        return kinds[type(self.row)]

    def __str__(self) -> str:
        values = self.row._asdict()
        del values["processes"], values["us"]
        return f"{self.table} {' '.join(map(str, values.values()))}"


def operations(cases: Cases, few: bool, gpu: bool) -> Iterator[Operation]:
    """Yields the operations, most important first.

    Args:
        cases: The shapes.
        few: Whether to leave out most of them.
        gpu: Whether they are for a GPU.
    """
    first, *others = cases.dtypes
    for linear in cases.few_linears if few else cases.linears:
        yield from _linear(linear, first)
    sizes = cases.bytes[1:3] if few else cases.bytes
    yield from _memory_bound(sizes, first)
    if gpu:  # norms and losses compute in float32 whatever the type of the products
        yield from _memory_bound(sizes[1:], "float32", first)
    for attention in cases.attention[:2] if few else cases.attention:
        yield from _attention("sdpa", attention, first)
    if few:
        return
    if gpu:
        yield from _attention("gridformer", cases.attention[0], first)
    for batch, m, n, k in cases.batched:
        yield _product(first, m, n, k, "nn", batch)
    for dtype in others:
        for linear in cases.few_linears:
            yield from _linear(linear, dtype)


def torch_dtype(dtype: str) -> torch.dtype:
    """Returns torch's type for the name of a type in a cluster file."""
    kind: torch.dtype = getattr(torch, "float32" if dtype == "tf32" else dtype)
    return kind


def _random(device: torch.device, dtype: str, *shape: int) -> Tensor:
    n = math.prod(shape)
    if device.type != "cpu" or n <= _DRAWN:
        return torch.randn(*shape, device=device).to(torch_dtype(dtype))
    # Drawing them would take longer than the measurement.
    repeats = -(-n // _DRAWN)
    return torch.randn(_DRAWN).to(torch_dtype(dtype)).repeat(repeats)[:n].view(shape)


def _linear(shape: LinearShape, dtype: str) -> Iterator[Operation]:
    """Yields the product of a linear layer, and the two products of its backward pass."""
    tokens, inner, outer = shape
    yield _product(dtype, tokens, outer, inner, "nn")
    yield _product(dtype, tokens, inner, outer, "nt")  # the gradient of the input
    yield _product(dtype, inner, outer, tokens, "tn")  # the gradient of the weight


def _product(
    dtype: str, m: int, n: int, k: int, order: Literal["nn", "nt", "tn"], batch: int = 1
) -> Operation:
    """Returns a product [m, k] x [k, n], whose operands are stored as `order` says."""

    def operand(device: torch.device, rows: int, cols: int, transposed: bool) -> Tensor:
        shape = (cols, rows) if transposed else (rows, cols)
        x = _random(device, dtype, *((batch, *shape) if batch > 1 else shape))
        return x.mT if transposed else x

    def build(device: torch.device) -> Run:
        a, b = operand(device, m, k, order[0] == "t"), operand(device, k, n, order[1] == "t")
        if dtype not in ("tf32", "float32"):
            return partial(torch.matmul, a, b)

        settings = torch.backends.cuda.matmul

        def run() -> Tensor:
            settings.allow_tf32 = dtype == "tf32"
            return a @ b

        return run

    n_bytes = float(batch * (m * n + n * k + m * k)) * (torch_dtype(dtype).itemsize + 4)
    row = ProductRow(dtype, 1, batch, m, n, k, order, 1.0)
    return Operation(row, n_bytes, 2.0 * batch * m * n * k, build)


def _attention(op: str, shape: AttentionShape, dtype: str) -> Iterator[Operation]:
    """Yields fused attention, forward and backward: PyTorch's, or our kernel with dropout."""
    batch, heads, queries, keys, width, causal = shape

    def forward_of(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        if op == "sdpa":
            return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        from gridformer.models.blocks import DropoutRng
        from gridformer.models.kernels import attention as kernel

        settings = kernel.Settings(causal, width**-0.5, p=0.1)
        counter = DropoutRng().counter("attention", 0, q.device)
        return lambda: kernel.attention(q, k, v, None, None, settings, counter=counter)

    def build(device: torch.device, backward: bool) -> Run:
        inputs = [
            _random(device, dtype, batch, n, heads, width).transpose(1, 2).requires_grad_()
            for n in (queries, keys, keys)
        ]
        forward = forward_of(*inputs)
        if not backward:
            return forward
        out = forward()  # of which the backward pass is timed
        return partial(torch.autograd.grad, out, inputs, torch.randn_like(out), retain_graph=True)

    def within(device: torch.device) -> AbstractContextManager[object]:
        measured = op == "sdpa" and device.type == "cuda"
        return attending(_fastest(shape, dtype, device) if measured else "auto")

    for backward in (False, True):
        row = AttentionRow(op, dtype, 1, *shape, backward, 1.0)
        flop = 4.0 * batch * heads * queries * keys * width
        flop *= (2.5 if backward else 1.0) * (0.5 if causal else 1.0)
        n_bytes = 32.0 * batch * heads * (queries + keys) * width
        yield Operation(row, n_bytes, flop, partial(build, backward=backward), within)


@cache
def _fastest(shape: AttentionShape, dtype: str, device: torch.device) -> str:
    """Returns the kernel of attention that `train.attention: auto` would choose for a shape."""
    batch, heads, queries, keys, width, causal = shape
    shapes = [Shape(batch, heads, heads, queries, keys, width, causal)]
    times = times_of(MEASURED, shapes, torch_dtype(dtype), device)
    return min(times, key=times.__getitem__, default="auto")


# --------------------------------------------------------------------------- memory-bound kernels


def _memory_bound(sizes: tuple[int, ...], dtype: str, known: str = "") -> Iterator[Operation]:
    """Yields memory-bound kernels, each reading and writing about the given numbers of bytes.

    Args:
        sizes: Numbers of bytes.
        dtype: The type of the tensors.
        known: The type with which all of them are measured, too.
    """
    for n_bytes, (op, (tensors, kernel)) in product(sizes, _KERNELS.items()):
        held = "float32" if op in _FLOAT32 else dtype
        if known and (op in _FLOAT32 or known == dtype):
            continue
        itemsize = torch_dtype(held).itemsize
        each = n_bytes // (tensors * itemsize)
        width = min(_WIDTH, 1 << max(0, each.bit_length() - 5))
        rows = max(1, each // width)
        moved = tensors * rows * width * itemsize

        def build(
            device: torch.device,
            kernel: Callable[[New], Run] = kernel,
            held: str = held,
            shape: tuple[int, int] = (rows, width),
        ) -> Run:
            return kernel(lambda: _random(device, held, *shape))

        yield Operation(MemoryRow(op, held, 1, moved, 1.0), 3.0 * moved, 0.0, build)


def _norm(new: New) -> Run:
    x = new()
    weight, bias = torch.ones_like(x[0]), torch.zeros_like(x[0])
    return partial(aten.native_layer_norm, x, [x.shape[-1]], weight, bias, 1e-5)


def _norm_backward(new: New) -> Run:
    x, g = new(), new()
    weight, bias, size = torch.ones_like(x[0]), torch.zeros_like(x[0]), [x.shape[-1]]
    _, mean, rstd = aten.native_layer_norm(x, size, weight, bias, 1e-5)
    three = [True, True, True]
    return partial(aten.native_layer_norm_backward, g, x, size, mean, rstd, weight, bias, three)


def _softmax_backward(new: New) -> Run:
    y, g = new().float().softmax(-1), new()
    return partial(torch.ops.aten._softmax_backward_data, g, y.to(g.dtype), -1, g.dtype)


def _adamw(new: New) -> Run:
    p, g, m = (new() for _ in range(3))
    v, step = new().abs(), torch.ones((), device=p.device)
    return lambda: torch._fused_adamw_(
        [p], [g], [m], [v], [], [step],
        amsgrad=False, lr=1e-9, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, maximize=False,
    )  # fmt: skip


# Names of torch's operators; how many tensors each reads and writes in all; the kernel.
_KERNELS: dict[str, tuple[int, Callable[[New], Run]]] = {
    "add": (3, lambda new: partial(torch.add, new(), new())),
    "mul": (2, lambda new: partial(torch.mul, new(), 0.5)),
    "copy_": (2, lambda new: partial(new().copy_, new())),
    "gelu": (2, lambda new: partial(F.gelu, new(), approximate="tanh")),
    "gelu_backward": (3, lambda new: partial(aten.gelu_backward, new(), new(), approximate="tanh")),
    "native_layer_norm": (2, _norm),
    "native_layer_norm_backward": (3, _norm_backward),
    "_softmax": (2, lambda new: partial(torch.softmax, new(), -1)),
    "_softmax_backward_data": (3, _softmax_backward),
    "sum": (1, lambda new: partial(torch.sum, new(), 0)),
    "exp": (2, lambda new: partial(torch.exp, new())),
    "_fused_adamw_": (7, _adamw),
}
