"""What networks of transformers call for attention and for experts, as gridformer computes them."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import torch
from torch import Tensor

from gridformer.config import ModelConfig
from gridformer.models.blocks.attention import AttentionHeads
from gridformer.models.blocks.dropout import DropoutRng
from gridformer.models.blocks.scores import ScoreBias, Window, added_to_scores
from gridformer.models.kernels.grouped import grouped_product

NAME = "gridformer"  # in the tables of transformers
_MASKS = {
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_masks_for_generate",
}
_WINDOW = re.compile(r"sliding_window=(self\.|getattr\(self\.config)")
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


def group_experts(network: Any) -> None:
    """Lets a network of transformers compute its experts by products of groups of tokens."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _grouped)
    network.set_experts_implementation(NAME)


def _grouped(experts: Any, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Computes experts as transformers calls them: tokens x, for each K experts and weights."""
    n_chosen = index_TK.shape[1]
    sorted_S, order_S = torch.sort(index_TK.flatten(), stable=True)
    every = torch.arange(experts.num_experts, device=x_TH.device)
    ends = torch.searchsorted(sorted_S, every, right=True, out_int32=True)

    def product(x: Tensor, name: str) -> Tensor:
        w = getattr(experts, name)
        y = grouped_product(x, w if experts.is_transposed else w.transpose(1, 2), ends)
        n_parts = getattr(experts, "alternating", {}).get(name, 1)
        return y.unflatten(-1, (-1, n_parts)).transpose(-1, -2).flatten(-2) if n_parts > 1 else y

    y = product(x_TH[order_S // n_chosen], "gate_up_proj" if experts.has_gate else "up_proj")
    y = product(experts._apply_gate(y) if experts.has_gate else experts.act_fn(y), "down_proj")
    spread = torch.zeros_like(y).index_copy(0, order_S, y).unflatten(0, (-1, n_chosen))
    return (weight_TK.to(y.dtype).unsqueeze(1) @ spread).squeeze(1)
