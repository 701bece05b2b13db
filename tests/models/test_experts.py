"""Mixtures of experts on one device: those of Hugging Face, plain formulas, and the router."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gridformer.mesh import Axis
from gridformer.models.blocks.experts import Balance, MixtureOfExperts, Router
from gridformer.parallel.tensor.experts import TokensOfGrid, move_biases
from gridformer.parallel.tensor.summa import Replicated
from tests.support.reference.shared import (
    V,
    assert_close,
    config_of,
    entries_of,
    in_files,
    pair,
    randomize,
    to_ours,
    tokens_of,
)

CPU = torch.device("cpu")
CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {"balance_loss": 0.05}) for kind in ("mixtral", "qwen3_moe", "olmoe")),
    ("qwen3_moe", {"normalized_gates": False, "expert_size": 40}),
    ("olmoe", {"normalized_gates": True, "experts_per_token": 1, "balance_loss": 0.05}),
    ("dots1", {}),
    ("dots1", {"normalized_gates": False, "dense_layers": 0, "n_experts": 9}),
]


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_equals_hugging_face(kind: str, changes: dict[str, Any]) -> None:
    """Compare logits, the losses of words and of balance, and all gradients of their sum."""
    ours, theirs = pair(kind, torch.float64, **changes)
    tokens, weight = tokens_of(V, 3, 20), ours.config.balance_loss
    x, y = tokens[:, :-1], tokens[:, 1:]
    balance = ours.train().balance
    balance.begin(CPU, x.numel(), 1.0)
    got = ours.loss_sum(x, y) / y.numel()
    balance.known(balance.counts)
    got.backward()
    out = theirs(x)
    assert_close(ours(x), out.logits)
    want = F.cross_entropy(out.logits.flatten(0, 1), y.flatten())
    assert_close(got.detach(), want.detach())
    if weight:
        of_balance = weight * out.aux_loss
        assert_close(balance.value / balance.n_terms, of_balance.detach())
        want = want + of_balance
    want.backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    grads |= {name: torch.zeros_like(b) for name, b in theirs.named_buffers() if "bias" in name}
    wanted = to_ours(entries_of(ours.config, kind), in_files(theirs, grads))
    assert wanted.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        if name.endswith("router.bias"):
            assert not parameter.grad.any(), name
        else:
            assert_close(parameter.grad, wanted[name])


# --------------------------------------------------------------------------- the router


def router_of(**changes: Any) -> Router:
    """Return a router with random weights; its own keys are those of `dots1` unless changed."""
    config = config_of("dots1", **{"hidden_size": 8, **changes})
    return randomize(Router(config, 1, Balance(config)), torch.float64)


def test_equal_scores_are_chosen_in_order() -> None:
    router = router_of(router="softmax", router_bias=False)
    x = torch.randn(7, 8, dtype=torch.float64)
    with torch.no_grad():
        router.weight[:, [1, 2, 4]] = router.weight[:, 3:4]
        logits = x @ router.weight
        last = logits[:, 0] < logits[:, 1]  # else expert 0 comes first
        expert, _, counts = router(x)
        assert expert.tolist() == [[1, 2, 3] if is_last else [0, 1, 2] for is_last in last]
        assert counts.tolist() == [int((expert == e).sum()) for e in range(5)]
        router.weight.zero_()
        assert router(x)[0].tolist() == [[0, 1, 2]] * 7


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_scores_choose_and_weigh(kind: str, normalized: bool) -> None:
    """A bias changes which experts are chosen, and no weight."""
    router = router_of(router=kind, normalized_gates=normalized, routed_scale=2.5)
    x = torch.randn(50, 8, dtype=torch.float64)
    logits = x @ router.weight
    scores = logits.softmax(-1) if kind == "softmax" else logits.sigmoid()
    assert router.bias is not None
    expert, gate, _ = router(x)
    want = (scores + router.bias).topk(3)[1].sort()[0]
    assert torch.equal(expert, want)
    assert not torch.equal(expert, scores.topk(3)[1].sort()[0]), "the bias must matter"
    weights = scores.gather(1, want)
    assert_close(gate, 2.5 * (weights / weights.sum(1, keepdim=True) if normalized else weights))


def test_scores_of_zero_have_weights() -> None:
    """The sum of sigmoids of a token may be 0."""
    router = router_of()
    x = torch.randn(1, 8, dtype=torch.float64)
    with torch.no_grad():
        router.weight.copy_(-1e6 * x.sign().t())
    assert not router(x)[1].any()


def test_the_router_computes_in_float32() -> None:
    """In bfloat16 both logits would be 1."""
    router = router_of(n_experts=2, experts_per_token=1, router_bias=False).bfloat16()
    with torch.no_grad():
        router.weight.zero_()
        router.weight[0] = 1.0
        router.weight[1] = torch.tensor([2**-11, 2**-10])
    expert, gate, _ = router(torch.ones(3, 8, dtype=torch.bfloat16))
    assert expert.tolist() == [[1]] * 3
    assert gate.dtype == torch.bfloat16


# --------------------------------------------------------------------------- the mixture


def mixture_of(**changes: Any) -> MixtureOfExperts:
    config = config_of("dots1", **{"hidden_size": 8, "routed_scale": 1.0, **changes})
    return randomize(MixtureOfExperts(config, 1, Balance(config), None), torch.float64)


def test_a_mixture_is_a_sum_over_experts() -> None:
    """Compare with all experts on all tokens, where those of other experts weigh 0."""
    mixture, x = mixture_of(), torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    experts = mixture.experts
    expert, gate, _ = mixture.router(x.flatten(0, 1))
    weights = torch.zeros(12, 5, dtype=torch.float64).scatter(1, expert, gate)
    gates = torch.einsum("nh,ehf->enf", x.flatten(0, 1), experts.gate.weight)
    inside = F.silu(gates) * torch.einsum("nh,ehf->enf", x.flatten(0, 1), experts.up.weight)
    want = torch.einsum("ne,enf,efh->nh", weights, inside, experts.down.weight).view_as(x)
    assert_close(mixture(x).detach(), want.detach())
    inputs = [x, *(p for p in mixture.parameters() if p is not mixture.router.bias)]
    draw = torch.randn_like(want)
    both = (torch.autograd.grad(y, inputs, draw, retain_graph=True) for y in (mixture(x), want))
    for got, wanted in zip(*both):
        assert_close(got, wanted)


def test_all_tokens_on_one_expert() -> None:
    """The others have no tokens, and gradients of zero, not none."""
    mixture = mixture_of(experts_per_token=1)
    assert mixture.router.bias is not None
    with torch.no_grad():
        mixture.router.bias[3] = 10.0
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    assert mixture.router(x.flatten(0, 1))[2].tolist() == [0, 0, 0, 12, 0]
    mixture(x).sum().backward()
    for matrix in (mixture.experts.gate, mixture.experts.up, mixture.experts.down):
        assert matrix.weight.grad is not None
        assert matrix.weight.grad.flatten(1).any(1).tolist() == [False, False, False, True, False]


def test_the_last_devices_have_the_tokens_that_are_left() -> None:
    """Of five tokens over four devices the last one has none."""
    x, lies = torch.zeros(1, 5, 8), []
    for index in range(4):
        axis = Axis("col", 4, index)
        tokens = TokensOfGrid(axis, "whole", Replicated(axis), Axis("experts"), 5)
        lies.append(tokens._part(x))
    assert lies == [2, 2, 1, 0]


# --------------------------------------------------------------------------- balance


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_losses_of_balance_are_those_of_the_papers(kind: str) -> None:
    """Their gradients join those of the router, as if they were a part of the loss."""
    changes = {"router": kind, "router_bias": False, "balance_loss": 0.3, "z_loss": 0.02}
    router = router_of(**changes, dense_layers=0, n_layers=1).train()
    router.layer, scale = 0, 8.0
    x = torch.randn(40, 8, dtype=torch.float64)
    router.balance.begin(CPU, 40, scale)
    expert, gate, counts = router(x)
    assert torch.equal(router.balance.counts[0], counts)
    router.balance.known(router.balance.counts)
    draw = torch.randn_like(gate)
    (got,) = torch.autograd.grad((gate * draw).sum(), router.weight)

    logits = x @ router.weight
    scores = logits.softmax(-1) if kind == "softmax" else logits.sigmoid()
    share = scores / scores.sum(-1, keepdim=True)
    of_tokens = F.one_hot(expert, 5).sum(1).double().mean(0)
    balance = 0.3 * 5 * (of_tokens * share.mean(0)).sum()
    balance = balance + 0.02 * torch.logsumexp(logits, -1).square().mean()
    chosen = scores.gather(1, expert)
    weights = 2.5 * chosen / chosen.sum(1, keepdim=True)
    (want,) = torch.autograd.grad((weights * draw).sum() + scale * balance, router.weight)
    assert_close(got, want)
    assert_close(router.balance.value / router.balance.n_terms, balance.detach())


def test_biases_move_by_the_sign_of_what_is_missing() -> None:
    ours, _ = pair("dots1", torch.float64, balance_rate=0.25, n_layers=3)
    counts = torch.tensor([[9, 1, 5, 6, 4], [5, 5, 5, 5, 5]])
    routers = [layer.mlp.router for name, layer in ours.layers.items() if name != "0"]
    before = [router.bias.clone() for router in routers]
    move_biases(ours, counts, torch.ones(()))  # the gradients were not finite
    assert all(torch.equal(router.bias, bias) for router, bias in zip(routers, before))
    move_biases(ours, counts, torch.zeros(()))
    moves = [(router.bias - bias).detach() / 0.25 for router, bias in zip(routers, before)]
    want = torch.tensor([[-1, 1, 0, -1, 1], [0, 0, 0, 0, 0]], dtype=torch.float64)
    assert torch.allclose(torch.stack(moves), want)
