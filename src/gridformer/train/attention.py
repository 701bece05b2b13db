"""Which of PyTorch's kernels computes attention on GPUs: one that is named, or the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend

from gridformer.comm.agree import first_text
from gridformer.config import RunConfig
from gridformer.mesh import Axis
from gridformer.utils.errors import ConfigError
from gridformer.utils.tensors import measured

MEASURED = "flash", "cudnn", "efficient", "flash3", "flash4"
_IMPLEMENTATIONS = {"flash3": "FA3", "flash4": "FA4"}
_KINDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# What computes attention where another kernel does not apply.
_ORDER = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, *_KINDS.values()]


@contextmanager
def attending(name: str, alone: bool = False) -> Iterator[None]:
    """Lets PyTorch compute attention with a kernel, and with others where it does not apply.

    Compiled code keeps the kernel with which it was traced. Entering takes the host 70 us, so a
    step enters once.

    Args:
        name: A value of `train.attention`; with auto PyTorch chooses.
        alone: Whether an error is raised where the kernel does not apply.
    """
    if name == "auto":
        yield
        return
    first = _KINDS.get(name, SDPBackend.FLASH_ATTENTION)
    _implement(_IMPLEMENTATIONS.get(name))
    others = [] if alone or name == "math" else _ORDER
    with attention.sdpa_kernel([first, *others], set_priority=True):
        yield


def _implement(wanted: str | None) -> None:
    """Makes an implementation the one that PyTorch calls FlashAttention; None is its own."""
    if getattr(attention, "current_flash_attention_impl", lambda: None)() == wanted:
        return
    if wanted is None:
        attention.restore_flash_attention_impl()
    elif wanted in getattr(attention, "list_flash_attention_impls", list)():
        attention.activate_flash_attention_impl(wanted)
    else:
        raise RuntimeError(f"this version of PyTorch has no {wanted}")


class Shape(NamedTuple):
    """Attention of [batch, heads, queries, width] to [batch, kv_heads, keys, width]."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    causal: bool


def shapes_of(run: RunConfig) -> list[Shape]:
    """Returns the shapes of attention that a device computes, heads shared equally by devices."""
    model, layout, rows = run.model, run.layout, run.layout.sequence_rows
    sequences = max(1, run.train.global_batch // (layout.dp * layout.micro_batches))
    sharing = model.n_heads // model.kv_heads
    devices = layout.rows * layout.cols * layout.branches // rows
    pairs = max(1, sequences * model.kv_heads // devices)  # of a sequence and a head of keys
    queries = max(1, run.seq_len // (2 * rows)) if rows > 1 else run.seq_len
    kinds = (True, False) if model.two_stacks else (model.family != "bert",)
    heads = 1, pairs * sharing, pairs
    return [Shape(*heads, queries, run.seq_len, model.head_width, causal) for causal in kinds]


def times_of(
    names: Sequence[str], shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Returns the seconds that kernels take forward and backward, without those that cannot run."""
    operands = []
    for b, n, m, s, seen, d, causal in shapes:
        sizes = (b, s, n, d), (b, seen, m, d), (b, seen, m, d)
        q, k, v = (torch.randn(size, dtype=dtype, device=device).transpose(1, 2) for size in sizes)
        operands.append((q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), causal))
    try:
        return measured({name: partial(_attend, name, operands) for name in names}, device)
    finally:
        _implement(None)


def _attend(name: str, operands: Sequence[tuple[Tensor, Tensor, Tensor, bool]]) -> None:
    with attending(name, alone=True):
        for q, k, v, causal in operands:
            s, seen, mask = q.shape[2], k.shape[2], None
            if causal and s < seen:
                from torch.nn.attention.bias import causal_lower_right

                mask = causal_lower_right(s, seen)
            more = {"enable_gqa": True} if k.shape[1] < q.shape[1] else {}
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal and s == seen, **more
            )
            torch.autograd.grad(out, (q, k, v), out)


def choose(run: RunConfig, device: torch.device, world: Axis) -> tuple[str, str]:
    """Returns the kernel of a run's attention, and what a reader of the terminal is told about it.

    Rank 0 measures, and all ranks, which call this together, get its choice.

    Raises:
        ConfigError: The kernel that is named does not run on this device.
    """
    train, wanted = run.train, run.train.attention
    dtype = getattr(torch, train.dtype)
    if device.type == "cpu" or wanted == "math" or dtype == torch.float64:
        return wanted, ""
    if train.deterministic and wanted == "auto":
        how = "by train.deterministic=true, which measures nothing"
        return "flash", f"train.attention=auto: flash, {how}"
    said = ""
    if world.index == 0:
        shapes = shapes_of(run)
        times = times_of(MEASURED if wanted == "auto" else (wanted,), shapes, dtype, device)
        if not times and wanted != "auto":
            times = times_of(MEASURED, shapes, dtype, device)
        best = min(times, key=times.__getitem__, default="math")
        each = ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in times.items())
        said = f"{best}: forward and backward take {each or 'too much memory in all others'}"
    name, _, why = (said := first_text(said, world)).partition(":")
    if wanted == "auto":
        return name, f"train.attention=auto: {said}"
    if name != wanted:
        raise ConfigError(f"train.attention={wanted} does not run on this GPU: use {name} ({why})")
    return name, ""
