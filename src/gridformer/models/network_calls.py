"""What networks of transformers call for attention and for experts, as gridformer computes them."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gridformer.config import ModelConfig
from gridformer.config.factory import logits_of
from gridformer.models.blocks.attention import AttentionHeads
from gridformer.models.blocks.dropout import DropoutRng
from gridformer.models.blocks.experts import Tokens, counts_of, expert_product, sorted_rows
from gridformer.models.blocks.scores import ScoreBias, Window, added_to_scores
from gridformer.utils.tensors import TensorAttribute

NAME = "gridformer"  # in the tables of transformers
POSITIONS = "position_ids"  # the argument with the positions of tokens
_MASKS = {
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_masks_for_generate",
}
_WINDOW = re.compile(r"sliding_window=(self\.|getattr\(self\.config)")
_ROTATED = "gridformer_rotated"
_SIGNED = TensorAttribute[Tensor]("signed_sines")
_CALL = "ALL_ATTENTION_FUNCTIONS.get_interface("


class AttentionAlone(AttentionHeads):
    """Attention without products: [b, n, s, d] of queries, keys and values to [b, s, n, d]."""

    def __init__(self, config: ModelConfig, dropout_rng: DropoutRng) -> None:
        super().__init__(config, "attention", dropout_rng, scaled=True)
        self.p = 0.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int) -> Tensor:
        """Attends to keys that end where the queries do; a window of 0 hides none."""
        n, s, past = q.shape[1], q.shape[2], k.shape[2] - q.shape[2]

        def of(queries: slice) -> ScoreBias | None:
            near = Window(window, past + queries.stop, q.device)
            size = queries.stop - queries.start
            return added_to_scores(size, q.dtype, None, None, True, self.fused, near)

        mask = None
        if causal and window:
            mask = self.sequence.each_segment(s * self.sequence.n, of)
        return self.recompute.attention(self._heads_of, q, k, v, causal, mask).unflatten(
            -1, (n, -1)
        )


def attends_plainly(network: Any) -> bool:
    """Whether a network of transformers asks for attention with causal masks and windows alone."""
    if not hasattr(network, "set_attn_implementation"):
        return False
    source = inspect.getsource(sys.modules[type(network).__module__])
    masks = set(re.findall(r"\bcreate_\w*mask\w*", source))
    more = re.search(r"softcap=|s_aux=|position_bias=|_mask_function=|causal_skip", source)
    known = _CALL in source and network._supports_sdpa
    # Windows must be said in the call, as there is no mask that has them.
    says = "create_sliding_window_causal_mask" not in masks or _WINDOW.search(source)
    return bool(known and masks and masks <= _MASKS and says and not more)


def attend_in(network: Any, attention: AttentionAlone | None = None) -> None:
    """Lets a network of transformers attend by `attention`, or a new one, if it attends plainly.

    It makes no masks then: transformers makes them as soon as a step is recorded or compiled.
    """
    if not attends_plainly(network):
        return
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)
    network.set_attn_implementation(NAME)
    if attention is None:
        attention = AttentionAlone(ModelConfig(n_layers=1, hidden_size=1, n_heads=1), DropoutRng())
    for module in network.modules():
        vars(module)["attending"] = attention  # it is not one of its submodules


def _attend(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    attention: AttentionAlone = module.attending
    attention.scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    causal = module.is_causal if is_causal is None else is_causal
    return attention(q, k, v, causal, sliding_window or 0), None


class AttendBy(TorchFunctionMode):
    """Calls a function in place of torch's scaled_dot_product_attention, with its arguments."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced = function is F.scaled_dot_product_attention
        return (self.attend if replaced else function)(*args, **(kwargs or {}))


def attending(attention: AttentionAlone | None) -> AbstractContextManager[Any]:
    """Returns a context in which torch's attention is gridformer's, if rows divide sequences."""
    if attention is None or attention.sequence.n == 1:
        return nullcontext()
    return AttendBy(partial(_attend_as_torch, attention))


def _attend_as_torch(
    attention: AttentionAlone,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    attention.scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attention(q, k, v, is_causal, 0).transpose(1, 2)


def mixing_of_tokens(network: nn.Module) -> str:
    """Returns what keeps a network of tokens from running on some tokens of each sequence, if any.

    Args:
        network: It is on the meta device. Its code runs on the processor with other weights, which
            need no memory, and with attention that sees one token: if tokens change places
            with their positions, logits must do so, too.
    """
    if POSITIONS not in inspect.signature(network.forward).parameters:
        return f"its forward has no argument {POSITIONS}=None, the positions [1, s] of tokens"
    draw, s = torch.Generator().manual_seed(0), 8

    def value(x: Tensor) -> Tensor:  # element [i, j, ...] is number i + j + ... of a line
        line = torch.arange(sum(x.shape) + 1).to(x.dtype)
        if x.is_floating_point():
            line = torch.randn(len(line), generator=draw, dtype=torch.float64) / 8
        return line.as_strided(x.shape, (1,) * x.dim())

    def attend(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: None = None, dropout_p: float = 0.0, **_: Any
    ) -> Tensor:
        if attn_mask is not None or dropout_p:
            raise ValueError("attention has a mask or dropout")
        return q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], 1)

    held = (*network.named_parameters(), *network.named_buffers())
    values = {name: value(x) for name, x in held}
    tokens, places = torch.arange(s).unsqueeze(0), torch.arange(s).flip(0)
    try:
        with torch.no_grad(), AttendBy(attend):
            ahead, turned = (
                torch.func.functional_call(network, values, (order,), {POSITIONS: order})
                for order in (tokens, tokens[:, places])
            )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    ahead, turned = logits_of(ahead), logits_of(turned)
    if torch.allclose(ahead[:, places], turned, rtol=1e-6, atol=1e-6 * float(ahead.abs().max())):
        return ""
    return (
        f"logits of a token depend on others without torch's scaled_dot_product_attention, or on "
        f"its place instead of {POSITIONS}"
    )


def rotate_in(network: nn.Module) -> None:
    """Lets modules that rotate queries and keys by the code of transformers' Llama do it in fewer
    kernels; more than a hundred architectures have a copy of that code."""
    for part in network.modules():
        if (forward := _rotating(type(part).forward)) is not None:
            vars(part)["forward"] = MethodType(forward, part)


@cache
def _rotating(forward: Any) -> Any:
    """Returns a function that calls `_rotated` in place of the rotation, if it is Llama's."""
    code: Any = getattr(forward, "__code__", None)
    rotation, place = "apply_rotary_pos_emb", str(getattr(forward, "__module__", ""))
    if not place.startswith("transformers.") or rotation not in getattr(code, "co_names", ()):
        return None
    from transformers.models.llama import modeling_llama as llama

    known, theirs = forward.__globals__, vars(llama)
    if any(_code_of(known.get(n)) != _code_of(theirs.get(n)) for n in (rotation, "rotate_half")):
        return None
    known[_ROTATED] = _rotated  # a name beside theirs, whose values stay
    code = code.replace(co_names=tuple({rotation: _ROTATED}.get(n, n) for n in code.co_names))
    return FunctionType(code, known, None, forward.__defaults__, forward.__closure__)


def _code_of(function: Any) -> tuple[Any, ...]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    # Without what it says of itself.
    return () if code is None else (code.co_code, code.co_names, code.co_consts[1:])


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Returns q and k rotated; all layers read the same sines, negative for firsts of pairs."""
    half = sin.shape[-1] // 2
    if (signed := _SIGNED.get(sin)) is None:
        signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        _SIGNED.set(sin, signed)
    cos, signed = cos.unsqueeze(unsqueeze_dim), signed.unsqueeze(unsqueeze_dim)
    q_, k_ = (torch.addcmul(x * cos, x.roll(half, -1), signed) for x in (q, k))
    return q_, k_


def group_experts(network: Any) -> None:
    """Lets a network of transformers compute its experts by products of groups of tokens."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _grouped)
    network.set_experts_implementation(NAME)


def _grouped(experts: Any, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Computes experts as transformers calls them: tokens x, for each K experts and weights.

    `experts.tokens` says where the experts are, if not all of them are here.
    """

    def product(x: Tensor, name: str, ends: Tensor) -> Tensor:
        w = getattr(experts, name)
        y = expert_product(x, w if experts.is_transposed else w.transpose(1, 2), ends)
        if experts.has_bias:
            counts = ends.diff(prepend=ends.new_zeros(1))
            bias = getattr(experts, f"{name}_bias")
            y = y + bias.repeat_interleave(counts, 0, output_size=len(y))
        n_parts = getattr(experts, "alternating", {}).get(name, 1)
        return y.unflatten(-1, (-1, n_parts)).transpose(-1, -2).flatten(-2) if n_parts > 1 else y

    def compute(x: Tensor, ends: Tensor) -> Tensor:
        y = product(x, "gate_up_proj" if experts.has_gate else "up_proj", ends)
        y = experts._apply_gate(y) if experts.has_gate else experts.act_fn(y)
        return product(y, "down_proj", ends)

    tokens = getattr(experts, "tokens", None) or Tokens()
    rows, restore = sorted_rows(x_TH, index_TK.flatten(), index_TK.shape[1])
    results = restore(tokens.compute(rows, counts_of(index_TK, experts.num_experts), compute))
    y_TKH = results.unflatten(0, index_TK.shape)
    return (weight_TK.to(y_TKH.dtype).unsqueeze(1) @ y_TKH).squeeze(1)
