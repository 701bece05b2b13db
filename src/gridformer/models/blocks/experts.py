"""Mixtures of experts: a router, experts of which each token passes k of E, and their balance.

Everything is dropless, and independent of how tokens lie on devices: a token's experts are in the
order of their numbers, equal scores are in that order, too, and results are added in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gridformer.config import ModelConfig
from gridformer.models.blocks.cast import cast
from gridformer.models.blocks.late_gradient import SPLIT, LateGradient
from gridformer.models.blocks.linear import GatedProduct, Init, new_parameter
from gridformer.models.blocks.recompute import Recompute
from gridformer.models.kernels.grouped import grouped_product, grouped_sum
from gridformer.utils.torch_private import in_backward


class Balance:
    """How many tokens each expert gets in a step, and the losses that depend on it.

    All mixtures of a model share it. The trainer calls `begin` before the passes of a step, and
    `known` once the tokens of the whole batch are counted.

    Attributes:
        counts: How many tokens of this device were sent to each expert in the step [L, E].
        total: Those of the global batch, once they are known.
        value: This device's part of both losses, summed over its tokens, in float64.
        first: Whether this device counts: one of those that route the same tokens.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.n_layers = config.n_layers - config.dense_layers
        self.first = True
        self.counts: Tensor
        self.total: Tensor | None = None
        self._counting = False
        self.value: Tensor
        self._n_tokens, self._scale = 0, 1.0
        self._pull: Tensor | None = None  # E times the share of each expert in all tokens [E]

    @property
    def counts_first(self) -> bool:
        """Whether tokens must be counted before the first backward pass."""
        return self.config.balance_loss > 0.0

    @property
    def n_terms(self) -> int:
        """How many terms `value` has over the global batch; 0 if there is no such loss."""
        wanted = self.config.balance_loss or self.config.z_loss
        return self._n_tokens * self.n_layers if wanted else 0

    def begin(self, device: torch.device, n_tokens: int, scale: float) -> None:
        """Starts a step whose global batch has `n_tokens`, with a loss scale."""
        shape = self.n_layers, self.config.n_experts
        self.counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self.value = torch.zeros((), dtype=torch.float64, device=device)
        self._n_tokens, self._scale, self._counting, self.total = n_tokens, scale, True, None

    def known(self, counts: Tensor) -> None:
        """Takes the counts [L, E] of the global batch, and counts no more in this step."""
        self.total, self._counting = counts, False
        mean = counts.sum(0).to(torch.float64) / counts.sum() * self.config.experts_per_token
        self._pull = mean * self.config.n_experts * self.config.balance_loss

    def count(self, layer: int, counts: Tensor) -> None:
        """Adds the counts [E] of some tokens, unless they are counted again."""
        if self._counting and self.first and not in_backward():
            self.counts[layer - self.config.dense_layers] += counts

    def on(self, logits_NE: Tensor) -> Tensor:
        """Returns the logits, whose gradients also get those of the losses of balance."""
        if not self.n_terms or not self.first or not logits_NE.requires_grad:
            return logits_NE
        out: Tensor = _Balanced.apply(logits_NE, self)
        return out

    def gradient(self, logits_NE: Tensor) -> Tensor:
        """Returns the gradient of the losses for some logits, and adds to `value`."""
        with torch.enable_grad():
            logits = logits_NE.detach().requires_grad_()
            terms = self.config.z_loss * logits.logsumexp(-1).square().sum()
            if self._pull is not None:
                terms = terms + (probabilities(logits, self.config) * self._pull.to(logits)).sum()
            (grad,) = torch.autograd.grad(terms, logits)
        self.value += terms.detach()
        return grad * (self._scale / self.n_terms)


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NE: Tensor, balance: Balance) -> Tensor:
        ctx.save_for_backward(logits_NE)
        ctx.balance = balance
        return logits_NE.view_as(logits_NE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (logits_NE,) = ctx.saved_tensors
        return grads[0] + ctx.balance.gradient(logits_NE), None


def scores_of(logits_NE: Tensor, config: ModelConfig) -> Tensor:
    """Returns the scores of experts [n, E] for n tokens."""
    return logits_NE.softmax(-1) if config.router == "softmax" else logits_NE.sigmoid()


def probabilities(logits_NE: Tensor, config: ModelConfig) -> Tensor:
    """Returns scores whose sum is 1."""
    scores = scores_of(logits_NE, config)
    return scores if config.router == "softmax" else scores / scores.sum(-1, keepdim=True)


class Router(nn.Module):
    """Chooses k of E experts for each token, and weighs them, in float32 at least.

    The gradient of `bias` is zero: gridformer.parallel.tensor.experts changes it after each step.
    """

    def __init__(self, config: ModelConfig, layer: int, balance: Balance) -> None:
        super().__init__()
        self.config, self.layer, self.balance = config, layer, balance
        h, n = config.hidden_size, config.n_experts
        self.weight = new_parameter(h, n, init=Init(std=config.init_std))
        self.bias = new_parameter(n, init=Init()) if config.router_bias else None

    def forward(self, x_NH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the experts [n, k] of n tokens, their weights, and the tokens of each expert [E].

        Weights are in the type of x.
        """
        config = self.config
        wide = torch.promote_types(x_NH.dtype, torch.float32)
        logits_NE = self.balance.on(x_NH.to(wide) @ self.weight.to(wide))
        scores_NE = scores_of(logits_NE, config)
        chosen_NE = scores_NE.detach() if self.bias is None else scores_NE.detach() + self.bias
        # topk promises no order of equal scores.
        expert_NK = chosen_NE.sort(dim=-1, descending=True, stable=True)[1]
        expert_NK = expert_NK[:, : config.experts_per_token].sort(-1)[0]
        gate_NK = scores_NE.gather(-1, expert_NK)
        if config.normalized_gates:
            gate_NK = gate_NK / (gate_NK.sum(-1, keepdim=True) + _TINY[config.router])
        gate_NK = gate_NK * config.routed_scale
        counts_E = counts_of(expert_NK, config.n_experts)
        if self.bias is not None:
            gate_NK = _BesideBias.apply(gate_NK, self.bias)
        if self.training:
            self.balance.count(self.layer, counts_E)
        return expert_NK, gate_NK.to(x_NH.dtype), counts_E


class _BesideBias(torch.autograd.Function):
    """Gives the bias its gradient, so that nothing waits for it: sums, or what frees a layer."""

    @staticmethod
    def forward(ctx: Any, gate_NK: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(bias)
        return gate_NK.view_as(gate_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], torch.zeros_like(ctx.saved_tensors[0])


# Is added to the sum of a token's scores, as DeepSeek-V3 does, whose scores may all be 0.
_TINY = {"softmax": 0.0, "sigmoid": 1e-20}


class Whole:
    """A matrix of each expert that this device has whole."""

    def gather(self, weight: Tensor) -> Tensor:
        return weight

    def scatter(self, grad: Tensor) -> Tensor:
        return grad


class ExpertMatrix(nn.Module):
    """A matrix [K, N] of each of E experts, which multiplies rows sorted by expert.

    `whole` gathers it, and sums its gradient, where devices hold parts of both.
    """

    cast_parameters = ("weight",)

    def __init__(self, n_experts: int, n_in: int, n_out: int, init: Init) -> None:
        super().__init__()
        self.weight = new_parameter(n_experts, n_in, n_out, init=init)
        self.whole = Whole()

    def forward(self, x_SK: Tensor, ends: Tensor) -> Tensor:
        """Multiplies the rows of each expert e, which end at `ends[e]`, int32 [E]: [S, N]."""
        return expert_product(x_SK, self.weight, ends, self.whole)


class Experts(nn.Module):
    """E gated feed-forwards of inner width f: rows [S, h], sorted by expert, to [S, h]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        n, h, f = config.n_experts, config.hidden_size, config.expert_size
        init = Init(std=config.init_std)
        self.gate, self.up = (ExpertMatrix(n, h, f, init) for _ in range(2))
        self.down = ExpertMatrix(n, f, h, init)

    def forward(self, x_SH: Tensor, ends: Tensor) -> Tensor:
        """Computes the rows of each expert; see `ExpertMatrix`."""
        out: Tensor = self.down(
            GatedProduct.apply(self.gate(x_SH, ends), self.up(x_SH, ends)), ends
        )
        return out


def expert_product(x: Tensor, weight: Tensor, ends: Tensor, whole: Whole | None = None) -> Tensor:
    """Returns x[i] w[e] [S, N] of rows x [S, K] of experts e and their matrices w [E, K, N].

    The rows of an expert end at `ends[e]`, int32.
    """
    late = LateGradient.of(weight) if SPLIT.wanted else None
    y: Tensor = _ExpertProduct.apply(x, weight, ends, whole or Whole(), late)
    return y


class _ExpertProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        whole: Whole,
        late: LateGradient | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.late = late
        # Recomputation replaces saved tensors, and only a parameter has a cast copy.
        ctx.weight, ctx.whole = weight if weight.is_leaf else None, whole
        w = whole.gather(cast(weight, x.dtype))
        y: Tensor = grouped_product(x, w, ends)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, ends = ctx.saved_tensors
        weight = weight if ctx.weight is None else ctx.weight
        grad, (grad_x, grad_w) = grads[0].contiguous(), (None, None)
        if ctx.needs_input_grad[0]:
            w = ctx.whole.gather(cast(weight, x.dtype))
            grad_x = grouped_product(grad, w.transpose(1, 2), ends)
        if ctx.needs_input_grad[1]:
            gradient = partial(_expert_gradient, x.detach(), grad, weight, ends, ctx.whole)
            if ctx.late is None or not ctx.late.leave(gradient):
                grad_w = gradient()
        return grad_x, grad_w, None, None, None


def _expert_gradient(x: Tensor, grad: Tensor, weight: Tensor, ends: Tensor, whole: Whole) -> Tensor:
    """Returns the gradient of the matrices of experts in a product, given that of its result."""
    turned = weight.stride(1) == 1  # a transpose, as its gradient is then
    total = grouped_sum(*((grad, x) if turned else (x, grad)), ends)
    return whole.scatter(total.transpose(1, 2) if turned else total).to(weight.dtype)


class _Permuted(torch.autograd.Function):
    """Rows of x by number; the gradient adds the rows of each k that came from one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, back: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.k = k
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (back,) = ctx.saved_tensors
        rows = grads[0].index_select(0, back)
        if ctx.k > 1:
            rows = rows.view(-1, ctx.k, *rows.shape[1:]).sum(1)
        return rows, None, None, None


def sorted_rows(x: Tensor, keys: Tensor, k: int = 1) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Sorts k copies of each row of x [n, ..] by keys [n k], equal ones in order.

    Returns:
        The sorted rows [n k, ..], and a function that brings rows back to the order of the keys.
    """
    order = keys.argsort(stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=keys.device))
    rows: Tensor = _Permuted.apply(x, order if k == 1 else order // k, back, k)

    def restore(y: Tensor) -> Tensor:
        out: Tensor = _Permuted.apply(y, back, order, 1)
        return out

    return rows, restore


# Computes rows [S, h], sorted by expert, of which those of expert e end at `ends[e]`, int32 [E].
ComputeRows = Callable[[Tensor, Tensor], Tensor]


def counts_of(expert_NK: Tensor, n_experts: int) -> Tensor:
    """Returns how many of n tokens, of which each has k experts, each expert has [E]."""
    flat = expert_NK.flatten()
    return flat.new_zeros(n_experts).scatter_add_(0, flat, torch.ones_like(flat))


class Tokens:
    """How the tokens of a mixture lie on devices: all of them here, [b, s, h] between sections."""

    recompute = Recompute()

    def enter(self, x_BSH: Tensor) -> Tensor:
        """Returns the tokens that this device routes, with all of h: [n, h]."""
        return x_BSH.flatten(0, -2)

    def leave(self, y_NH: Tensor, x_BSH: Tensor) -> Tensor:
        """Returns their results as x lies; partial sums are added up."""
        return y_NH.view(x_BSH.shape)

    def compute(self, rows_SH: Tensor, counts_E: Tensor, experts: ComputeRows) -> Tensor:
        """Computes rows [S, h], sorted by expert, of which counts [E] tells how many each has."""
        return experts(rows_SH, counts_E.cumsum(0).to(torch.int32))


class MixtureOfExperts(nn.Module):
    """The sum of k routed experts, weighted by the router, and of shared experts, on [b, s, h].

    See Shazeer et al. 2017; Fedus et al. 2021; for shared experts Dai et al. 2024. `tokens` says
    how the tokens lie on devices.
    """

    def __init__(
        self, config: ModelConfig, layer: int, balance: Balance, shared: nn.Module | None
    ) -> None:
        super().__init__()
        self.router = Router(config, layer, balance)
        self.experts = Experts(config)
        self.shared = shared
        self.tokens = Tokens()

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_NH = self.tokens.enter(x_BSH)
        expert_NK, gate_NK, counts_E = self.router(x_NH)
        rows_SH, restore = sorted_rows(x_NH, expert_NK.flatten(), expert_NK.shape[1])
        results = restore(self.tokens.compute(rows_SH, counts_E, self.experts))
        y_NKH = results.view(*expert_NK.shape, results.shape[-1])
        y_BSH = self.tokens.leave((y_NKH * gate_NK.unsqueeze(-1)).sum(1), x_BSH)
        return y_BSH if self.shared is None else y_BSH + self.shared(x_BSH)
