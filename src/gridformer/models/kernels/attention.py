"""The operators of attention, forward and backward, which never hold all scores at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gridformer.models.kernels.library import LIBRARY, define

MAX_HEAD_BYTES = 512  # tiles of a larger head do not fit into a GPU's shared memory

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? valid, Tensor? bias, Tensor? documents, Tensor? counter"
)
_SETTINGS = (
    "bool causal, float scale, int first_head, float p, int window, int first_query, int first_key"
)
define(f"attention({_INPUTS}, {_SETTINGS}) -> (Tensor, Tensor)")
define(
    f"attention_backward(Tensor grad, {_INPUTS}, Tensor? key_documents, Tensor out, Tensor lse, "
    f"{_SETTINGS}, bool wants_bias) -> (Tensor, Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True)
class Settings:
    """The settings of attention.

    Attributes:
        causal: Whether a query sees only keys up to its own position. The last query and the last
            key are at the same position.
        scale: A factor of the scores.
        first_head: The global index of the first head.
        p: The probability of dropping an attention probability; 0 means no dropout.
        window: How many keys a query sees at most if `causal`, of which the one at its own
            position is the last; 0 means all of them.
        first_query: The global index of the first query, on which dropout depends.
        first_key: The global index of the first key.
    """

    causal: bool
    scale: float
    first_head: int = 0
    p: float = 0.0
    window: int = 0
    first_query: int = 0
    first_key: int = 0

    def arguments(self) -> tuple[Any, ...]:
        """Returns them in the order of the operators' schemas."""
        return (
            *(self.causal, self.scale, self.first_head, self.p, self.window),
            *(self.first_query, self.first_key),
        )


def attention(
    q_BNSD: Tensor,
    k_BNTD: Tensor,
    v_BNTD: Tensor,
    valid_BT: Tensor | None,
    bias_NST: Tensor | None,
    settings: Settings,
    documents: tuple[Tensor, Tensor] | None = None,
    counter: Tensor | None = None,
) -> Tensor:
    """Computes attention; it is differentiable in q, k, v and the bias.

    Args:
        q_BNSD: Queries [b, n, s, d] for which `library.available` is true; a head has at most
            `MAX_HEAD_BYTES`.
        k_BNTD: Keys [b, m, S, d]; n / m heads of queries in a row share one head of keys.
        v_BNTD: Values [b, m, S, d].
        valid_BT: False where no query may attend to a key, bool [b, S].
        bias_NST: Added to the scores [n, s, S].
        documents: Where the document of each query, which it does not leave, begins and ends among
            the keys, int32 [b, 2, s], and where that of each key begins and ends among the queries,
            int32 [b, 2, S]. Both ascend. Tiles outside are left out.
        counter: What the dropout mask depends on (gridformer.models.blocks.dropout), if it exists.

    Returns:
        [b, n, s, d], in memory [b, s, n, d]. A query that sees no key gets zeros.
    """
    of_queries, of_keys = documents or (None, None)
    assert of_queries is None or q_BNSD.shape[2] == of_queries.shape[2]
    assert of_keys is None or k_BNTD.shape[2] == of_keys.shape[2]
    assert counter is not None or settings.p == 0.0
    masks = valid_BT, bias_NST, of_queries, counter, of_keys
    out: Tensor = _Attention.apply(q_BNSD, k_BNTD, v_BNTD, *masks, settings)
    return out


class _Attention(torch.autograd.Function):
    """Keeps its inputs, its result and one number per query."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        bias: Tensor | None,
        of_queries: Tensor | None,
        counter: Tensor | None,
        of_keys: Tensor | None,
        settings: Settings,
    ) -> Tensor:
        ops = torch.ops.gridformer
        inputs = q, k, v, valid, bias, of_queries, counter
        out, lse = ops.attention(*inputs, *settings.arguments())
        ctx.save_for_backward(*inputs, of_keys, out, lse)
        ctx.settings = settings
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wants_bias = ctx.needs_input_grad[4]
        q, k, v, bias = torch.ops.gridformer.attention_backward(
            grads[0], *ctx.saved_tensors, *ctx.settings.arguments(), wants_bias
        )
        return q, k, v, None, bias if wants_bias else None, None, None, None, None


def empty_heads(q_BNSD: Tensor, width: int = 0) -> Tensor:
    """Returns a tensor of the shape of q [b, n, s, d], or of heads of another width.

    In memory it is [b, s, n, d].
    """
    b, n, s, d = q_BNSD.shape
    return q_BNSD.new_empty(b, s, n, width or d).transpose(1, 2)


def empty_lse(q_BNSD: Tensor) -> Tensor:
    """Returns a tensor for one number per query, at least float32 [b, n, s]."""
    dtype = torch.promote_types(q_BNSD.dtype, torch.float32)
    return torch.empty(q_BNSD.shape[:3], dtype=dtype, device=q_BNSD.device)


@torch.library.impl(LIBRARY, "attention", "CUDA")
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    from gridformer.models.kernels import flash

    with torch.cuda.device(q.device):
        return flash.launch_attention(q, *rest)


@torch.library.impl(LIBRARY, "attention_backward", "CUDA")
def _(grad: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from gridformer.models.kernels import flash

    with torch.cuda.device(grad.device):
        return flash.launch_attention_backward(grad, *rest)


@torch.library.register_fake("gridformer::attention", lib=LIBRARY)
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_heads(q, v.shape[-1]), empty_lse(q)


@torch.library.register_fake("gridformer::attention_backward", lib=LIBRARY)
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    bias: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wants_bias = rest[-1]
    of_bias = torch.empty_like(bias) if wants_bias and bias is not None else q.new_empty(0)
    return empty_heads(q), empty_heads(k), empty_heads(v), of_bias
