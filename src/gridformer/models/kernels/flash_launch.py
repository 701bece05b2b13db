"""Launches the attention kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from gridformer.models.kernels.attention import empty_heads, empty_lse
from gridformer.models.kernels.flash import forward
from gridformer.models.kernels.flash_backward import (
    backward_bias,
    backward_keys,
    backward_queries,
)
from gridformer.models.kernels.library import threshold


def launch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    bias: Tensor | None,
    documents: Tensor | None,
    counter: Tensor | None,
    causal: bool,
    scale: float,
    first_head: int,
    p: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Computes attention on a GPU; see `attention.attention` for the tensors.

    Args:
        q: Queries [b, n, s, d].
        k: Keys [b, m, S, d]; n / m heads of queries in a row share one head of keys.
        v: Values [b, m, S, d].
        valid: False where no query may attend to a key, bool [b, S]; None hides no key.
        bias: Added to the scores [n, s, S]; None adds nothing.
        documents: Where the document of each query begins and ends among the keys, int32 [b, 2, s];
            None means that there is one document.
        counter: What the dropout mask depends on; None without dropout.
        causal: Whether a query sees only keys up to its own position.
        scale: A factor of the scores.
        first_head: The global index of the first head.
        p: The probability of dropping an attention probability; 0 means no dropout.
        window: How many keys a query sees at most if `causal`; 0 means all of them.

    Returns:
        The result [b, n, s, d], in memory [b, s, n, d], and for the backward pass one number per
        query [b, n, s]: the logarithm of the sum of its scores' exponentials.
    """
    q, k, v = map(_with_whole_rows, (q, k, v))
    out, lse = empty_heads(q), empty_lse(q)
    tiles = tile_sizes(q, forward=True)
    grid = (q.shape[0] * q.shape[1] * triton.cdiv(q.shape[2], tiles["R"]),)
    if lse.numel():
        forward[grid](
            q,
            k,
            v,
            *_masks(q, valid, bias, documents, counter),
            out,
            lse,
            *(x.stride()[:3] for x in (q, k, v, out)),
            _sizes(q, k),
            first_head,
            **_constants(causal, window, scale, p, valid, bias, documents),
            **tiles,
        )
    return out, lse


def launch_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    bias: Tensor | None,
    documents: Tensor | None,
    counter: Tensor | None,
    key_documents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    first_head: int,
    p: float,
    window: int,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of `launch_attention`, whose tensors and settings it takes.

    Args:
        grad: The gradient of the result [b, n, s, d].
        q: Queries [b, n, s, d].
        k: Keys [b, m, S, d]; n / m heads of queries in a row share one head of keys.
        v: Values [b, m, S, d].
        valid: False where no query may attend to a key, bool [b, S]; None hides no key.
        bias: Added to the scores [n, s, S]; None adds nothing.
        documents: Where the document of each query begins and ends among the keys, int32 [b, 2, s];
            None means that there is one document.
        counter: What the dropout mask depends on; None without dropout.
        key_documents: Where the document of each key begins and ends among the queries, int32
            [b, 2, S]; None as for `documents`.
        out: The result of the forward pass [b, n, s, d].
        lse: Its number per query [b, n, s].
        causal: Whether a query sees only keys up to its own position.
        scale: A factor of the scores.
        first_head: The global index of the first head.
        p: The probability of dropping an attention probability; 0 means no dropout.
        window: How many keys a query sees at most if `causal`; 0 means all of them.
        wants_bias: Whether the gradient of the bias is computed.

    Returns:
        The gradients of q, k, v and the bias, each of its tensor's shape. That of the bias has no
        elements if it is not wanted or there is no bias.
    """
    q, k, v, grad = map(_with_whole_rows, (q, k, v, grad))
    grad_q, grad_k, grad_v = empty_heads(q), empty_heads(k), empty_heads(v)
    grad_bias = q.new_empty(0)
    if wants_bias and bias is not None:
        grad_bias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    if not lse.numel():
        return grad_q, grad_k.zero_(), grad_v.zero_(), grad_bias.zero_()
    delta = torch.empty_like(lse)
    tiles, masks = tile_sizes(q, forward=False), _masks(q, valid, bias, documents, counter)
    sizes = _sizes(q, k)
    heads, of_keys = q.shape[0] * q.shape[1], k.shape[0] * k.shape[1]
    n_rows, n_columns = triton.cdiv(sizes[2], tiles["R"]), triton.cdiv(sizes[3], tiles["C"])
    rest = (sizes, first_head)
    constants = {**_constants(causal, window, scale, p, valid, bias, documents), **tiles}

    def strides(*tensors: Tensor) -> tuple[Any, ...]:
        return tuple(x.stride()[:3] for x in tensors)

    backward_queries[(heads * n_rows,)](
        *(q, k, v, *masks, out, grad, lse, delta, grad_q),
        *strides(q, k, v, out, grad, grad_q),
        *rest,
        **constants,
    )
    places = q if key_documents is None else key_documents.contiguous()
    backward_keys[(of_keys * n_columns,)](
        *(q, k, v, *masks, places, grad, lse, delta, grad_k, grad_v),
        *strides(q, k, v, grad, grad_k, grad_v),
        *rest,
        **constants,
    )
    if grad_bias.numel():
        backward_bias[(q.shape[1] * n_rows * n_columns,)](
            *(q, k, v, *masks, grad, lse, delta, grad_bias),
            *strides(q, k, v, grad),
            *rest,
            **constants,
        )
    return grad_q, grad_k, grad_v, grad_bias


def tile_sizes(q: Tensor, forward: bool) -> dict[str, int]:
    """Returns the sizes of tiles and how many threads and buffers a program has.

    They fit into the 99 KiB of shared memory that the smallest supported GPUs have.

    Args:
        q: Queries [.., d]; only their width and dtype are read.
        forward: Whether it is the forward kernel, which needs less memory.

    Returns:
        The constants of the kernels: `D`, the width of a tile, at least d; `R` and `C`, its numbers
        of queries and of keys; `num_warps` and `num_stages`, which Triton reads.
    """
    width = max(16, triton.next_power_of_2(q.shape[-1]))
    n_bytes = width * q.element_size()  # of a row
    if n_bytes > 256:
        return {"D": width, "R": 32, "C": 32, "num_warps": 4, "num_stages": 1}
    rows = 128 if forward and n_bytes <= 128 else 64
    return {"D": width, "R": rows, "C": 64, "num_warps": 8, "num_stages": 2}


def _constants(
    causal: bool,
    window: int,
    scale: float,
    p: float,
    valid: Tensor | None,
    bias: Tensor | None,
    documents: Tensor | None,
) -> dict[str, Any]:
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        "SCALE": scale,
        "CAUSAL": causal,
        "WINDOW": window,
        "VALID": valid is not None,
        "BIAS": bias is not None,
        "DOCUMENTS": documents is not None,
        "THRESHOLD": threshold(p),
        "GAIN": 1.0 / (1.0 - p),
        "PRECISION": "tf32" if tf32 else "ieee",
    }


def _with_whole_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _masks(
    q: Tensor,
    valid: Tensor | None,
    bias: Tensor | None,
    documents: Tensor | None,
    counter: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the masks as the kernels read them; q takes the place of a missing one."""
    mask = q if valid is None else valid.contiguous().view(torch.uint8)
    added = q if bias is None else bias.contiguous()
    bounds = q if documents is None else documents.contiguous()
    return mask, added, bounds, q if counter is None else counter


def _sizes(q: Tensor, k: Tensor) -> tuple[int, ...]:
    b, n, s, d = q.shape
    return b, n, s, k.shape[2], d, n // max(1, k.shape[1])
