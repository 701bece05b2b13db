"""Formulas of a device's products and messages, which estimates of time have in common."""

from __future__ import annotations

from typing import Literal

from gridformer.cluster.kernels import KernelWork
from gridformer.cluster.messages import Op
from gridformer.parallel.auto.cost import Choice

Way = Literal["enter", "leave"]
_OPS: dict[str, tuple[Op | None, Op]] = {
    "cut": ("all_gather", "reduce_scatter"),
    "replicated": (None, "all_reduce"),
    "first": ("broadcast", "reduce"),
}


def boundary_op(between: str, way: Way) -> Op | None:
    """Returns the message with which activations enter or leave a section; None if none is needed.

    Args:
        between: How activations lie between sections, see `Choices.between`.
        way: Whether they are gathered, or summed.
    """
    return _OPS[between][way == "leave"]


def product_work(batch: int, m: int, n: int, k: int, dtype: str, itemsize: int) -> KernelWork:
    """Returns the work of a product of `batch` matrices [m, k] and [k, n].

    Args:
        batch: The number of products of the same shapes.
        m: Rows of the first matrix.
        n: Columns of the second matrix.
        k: Columns of the first matrix and rows of the second.
        dtype: The data type that decides the speed of products, such as `tf32`.
        itemsize: Bytes of an element.

    Returns:
        2 m n k operations for each product, and the bytes of all three matrices, each of which is
        read or written once.
    """
    n_bytes = batch * (m * k + k * n + m * n) * itemsize
    return KernelWork("product", 2.0 * batch * m * n * k, n_bytes, dtype, (batch, m, n, k))


def cut_widths(choice: Choice, cols: int) -> tuple[int, int]:
    """Returns n_in and n_out of a sharded product on one of `cols` columns of devices."""
    n_in, n_out = choice.product.n_in, choice.n_out
    if choice.stays == "output":
        return n_in, max(1, n_out // cols)
    return max(1, n_in // cols), n_out


def traveling_width(choice: Choice) -> int:
    """Returns the width of the activation that enters or leaves the section of a product."""
    return choice.product.n_in if choice.stays == "output" else choice.n_out
