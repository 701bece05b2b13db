"""The operations that are measured, ready to run: products, fused attention, memory-bound kernels.

An operation is built on the device that is measured. Its operands are random numbers, because
processors run faster, and GPUs with less power, on zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.calibrate.cases import AttentionShape, BatchedShape, Cases, LinearShape

Run = Callable[[], object]
_WIDTH = 1024  # elements in a row of what is normalized
_DRAWN = 1 << 16  # random numbers in a tensor on a CPU, which are repeated in larger ones


@dataclass(frozen=True)
class Operation:
    """One thing to measure.

    Attributes:
        table: The table of the cluster file in which its time belongs.
        key: The columns of its row before `processes` is inserted and the time is added.
        n_bytes: About the memory that it needs.
        flop: Floating-point operations; 0 for memory-bound kernels.
        moved: Bytes that a memory-bound kernel reads and writes; 0 for the others.
        build: Creates the operands on a device, and returns what is timed.
    """

    table: Literal["products", "attention", "memory"]
    key: dict[str, Any]
    n_bytes: float
    flop: float
    moved: float
    build: Callable[[torch.device], Run]

    def __str__(self) -> str:
        return f"{self.table} {' '.join(str(value) for value in self.key.values())}"


def operations(cases: Cases, few: bool, gpu: bool) -> Iterator[Operation]:
    """Yields the operations, most important first.

    Args:
        cases: The shapes.
        few: Whether to leave out most of them.
        gpu: Whether they are for a GPU.
    """
    first, *others = cases.dtypes
    for shape in cases.few_linears if few else cases.linears:
        yield from _linear(shape, first)
    sizes = cases.bytes[1:3] if few else cases.bytes
    yield from _memory_bound(sizes, first)
    if gpu:  # norms and losses compute in float32 whatever the type of the products
        yield from _memory_bound(sizes[1:], "float32", first)
    for attention in cases.attention[:2] if few else cases.attention:
        yield from _attention(attention, first)
    if few:
        return
    if gpu:
        yield from _own_attention(cases.attention[0], first)
    for batched in cases.batched:
        yield from _batched(batched, first)
    for dtype in others:
        for shape in cases.few_linears:
            yield from _linear(shape, dtype)


def torch_dtype(dtype: str) -> torch.dtype:
    """Returns torch's type for the name of a type in a cluster file."""
    found: torch.dtype = getattr(torch, "float32" if dtype == "tf32" else dtype)
    return found


def _random(device: torch.device, dtype: str, *shape: int) -> Tensor:
    n = math.prod(shape)
    if device.type != "cpu" or n <= _DRAWN:
        return torch.randn(*shape, device=device).to(torch_dtype(dtype))
    # Drawing them would take longer than the measurement.
    repeats = -(-n // _DRAWN)
    return torch.randn(_DRAWN).to(torch_dtype(dtype)).repeat(repeats)[:n].view(shape)


# --------------------------------------------------------------------------- products


def _linear(shape: LinearShape, dtype: str) -> Iterator[Operation]:
    """Yields the product of a linear layer, and the two products of its backward pass."""
    tokens, inner, outer = shape

    def forward(device: torch.device) -> Run:
        x, w = _random(device, dtype, tokens, inner), _random(device, dtype, inner, outer)
        return _with_tf32(lambda: x @ w, dtype)

    def of_input(device: torch.device) -> Run:
        g, w = _random(device, dtype, tokens, outer), _random(device, dtype, inner, outer)
        return _with_tf32(lambda: g @ w.t(), dtype)

    def of_weight(device: torch.device) -> Run:
        x, g = _random(device, dtype, tokens, inner), _random(device, dtype, tokens, outer)
        return _with_tf32(lambda: x.t() @ g, dtype)

    for order, (m, n, k), build in (
        ("nn", (tokens, outer, inner), forward),
        ("nt", (tokens, inner, outer), of_input),
        ("tn", (inner, outer, tokens), of_weight),
    ):
        key = {"dtype": dtype, "batch": 1, "m": m, "n": n, "k": k, "order": order}
        size = torch_dtype(dtype).itemsize
        n_bytes = (tokens * inner + inner * outer + tokens * outer) * (size + 4)
        yield Operation("products", key, n_bytes, shape.flop, 0.0, build)


def _batched(shape: BatchedShape, dtype: str) -> Iterator[Operation]:
    batch, m, n, k = shape

    def build(device: torch.device) -> Run:
        a, b = _random(device, dtype, batch, m, k), _random(device, dtype, batch, k, n)
        return _with_tf32(lambda: a @ b, dtype)

    key = {"dtype": dtype, "batch": batch, "m": m, "n": n, "k": k, "order": "nn"}
    yield Operation("products", key, 8.0 * batch * (m * n + n * k + m * k), shape.flop, 0.0, build)


def _with_tf32(product: Run, dtype: str) -> Run:
    """Returns a product that sets whether float32 is multiplied as TF32."""
    if dtype not in ("tf32", "float32"):
        return product
    settings = torch.backends.cuda.matmul

    def run() -> object:
        settings.allow_tf32 = dtype == "tf32"
        return product()

    return run


# --------------------------------------------------------------------------- attention


def _attention(shape: AttentionShape, dtype: str) -> Iterator[Operation]:
    """Yields PyTorch's fused attention, forward and backward."""
    for backward in (False, True):

        def build(device: torch.device, backward: bool = backward) -> Run:
            q, k, v = _heads(shape, dtype, device)

            def forward() -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)

            return _passes(forward, (q, k, v), backward)

        yield _attention_operation("sdpa", shape, dtype, backward, build)


def _own_attention(shape: AttentionShape, dtype: str) -> Iterator[Operation]:
    """Yields the kernel of `gridformer.models.kernels` with dropout."""
    from gridformer.models.blocks import DropoutRng
    from gridformer.models.kernels import attention as kernel

    settings = kernel.Settings(shape.causal, shape.width**-0.5, p=0.1)
    for backward in (False, True):

        def build(device: torch.device, backward: bool = backward) -> Run:
            q, k, v = _heads(shape, dtype, device)
            counter = DropoutRng().counter("attention", 0, device)

            def forward() -> Tensor:
                return kernel.attention(q, k, v, None, None, settings, counter=counter)

            return _passes(forward, (q, k, v), backward)

        yield _attention_operation("gridformer", shape, dtype, backward, build)


def _attention_operation(
    op: str,
    shape: AttentionShape,
    dtype: str,
    backward: bool,
    build: Callable[[torch.device], Run],
) -> Operation:
    key = {"op": op, "dtype": dtype, **shape._asdict(), "backward": backward}
    b, n, s, t, d, _ = shape
    flop = shape.flop * (2.5 if backward else 1.0) * (0.5 if shape.causal else 1.0)
    return Operation("attention", key, 32.0 * b * n * (s + t) * d, flop, 0.0, build)


def _heads(
    shape: AttentionShape, dtype: str, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    b, n, s, t, d, _ = shape
    q, k, v = (
        _random(device, dtype, b, length, n, d).transpose(1, 2).requires_grad_()
        for length in (s, t, t)
    )
    return q, k, v


def _passes(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...], backward: bool) -> Run:
    """Returns the forward pass, or the backward pass of a forward pass that is run once here."""
    if not backward:
        return forward
    out = forward()
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


# --------------------------------------------------------------------------- memory-bound kernels


def _memory_bound(sizes: tuple[int, ...], dtype: str, known: str = "") -> Iterator[Operation]:
    """Yields memory-bound kernels, each reading and writing about the given numbers of bytes.

    Args:
        sizes: Numbers of bytes.
        dtype: The type of the tensors.
        known: The type with which all of them are measured, too.
    """
    for n_bytes in sizes:
        for op, (tensors, kernel) in _KERNELS.items():
            held = "float32" if op in _FLOAT32 else dtype
            if known and (op in _FLOAT32 or known == dtype):
                continue
            each = n_bytes // (tensors * torch_dtype(held).itemsize)
            width = min(_WIDTH, 1 << max(0, each.bit_length() - 5))
            rows = max(1, each // width)
            moved = tensors * rows * width * torch_dtype(held).itemsize

            def build(
                device: torch.device,
                kernel: _Kernel = kernel,
                held: str = held,
                shape: tuple[int, int] = (rows, width),
            ) -> Run:
                return kernel(lambda: _random(device, held, *shape))

            key = {"op": op, "dtype": held, "bytes": moved}
            yield Operation("memory", key, 3.0 * moved, 0.0, moved, build)


_Kernel = Callable[[Callable[[], Tensor]], Run]


def _add(new: Callable[[], Tensor]) -> Run:
    x, y = new(), new()
    return lambda: x + y


def _mul(new: Callable[[], Tensor]) -> Run:
    x = new()
    return lambda: x * 0.5


def _copy(new: Callable[[], Tensor]) -> Run:
    x, y = new(), new()
    return lambda: y.copy_(x)


def _gelu(new: Callable[[], Tensor]) -> Run:
    x = new()
    return lambda: F.gelu(x, approximate="tanh")


def _gelu_backward(new: Callable[[], Tensor]) -> Run:
    x, g = new(), new()
    return lambda: torch.ops.aten.gelu_backward(g, x, approximate="tanh")


def _norm(new: Callable[[], Tensor]) -> Run:
    x = new()
    weight, bias = torch.ones_like(x[0]), torch.zeros_like(x[0])
    return lambda: torch.ops.aten.native_layer_norm(x, [x.shape[-1]], weight, bias, 1e-5)


def _norm_backward(new: Callable[[], Tensor]) -> Run:
    x, g = new(), new()
    weight, bias = torch.ones_like(x[0]), torch.zeros_like(x[0])
    size = [x.shape[-1]]
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, size, weight, bias, 1e-5)
    return lambda: torch.ops.aten.native_layer_norm_backward(
        g, x, size, mean, rstd, weight, bias, [True, True, True]
    )


def _softmax(new: Callable[[], Tensor]) -> Run:
    x = new()
    return lambda: torch.softmax(x, -1)


def _softmax_backward(new: Callable[[], Tensor]) -> Run:
    y, g = new().float().softmax(-1), new()
    y = y.to(g.dtype)
    return lambda: torch.ops.aten._softmax_backward_data(g, y, -1, g.dtype)


def _sum(new: Callable[[], Tensor]) -> Run:
    x = new()
    return lambda: x.sum(0)


def _exp(new: Callable[[], Tensor]) -> Run:
    x = new()
    return lambda: x.exp()


def _adamw(new: Callable[[], Tensor]) -> Run:
    tensors = [new() for _ in range(3)]
    p, g, m = tensors
    v = new().abs()
    step = torch.ones((), device=p.device)
    return lambda: torch._fused_adamw_(
        [p], [g], [m], [v], [], [step],
        amsgrad=False, lr=1e-9, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, maximize=False,
    )  # fmt: skip


# Names of torch's operators; how many tensors each reads and writes in all; the kernel.
_KERNELS: dict[str, tuple[int, _Kernel]] = {
    "add": (3, _add),
    "mul": (2, _mul),
    "copy_": (2, _copy),
    "gelu": (2, _gelu),
    "gelu_backward": (3, _gelu_backward),
    "native_layer_norm": (2, _norm),
    "native_layer_norm_backward": (3, _norm_backward),
    "_softmax": (2, _softmax),
    "_softmax_backward_data": (3, _softmax_backward),
    "sum": (1, _sum),
    "exp": (2, _exp),
    "_fused_adamw_": (7, _adamw),
}
_FLOAT32 = ("_fused_adamw_", "exp")  # they work on float32 whatever the type of the computation
